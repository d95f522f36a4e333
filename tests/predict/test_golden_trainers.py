"""What exporters of real trainers write wrong is refused at load by golden examples, and taken once it is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tierstore.errors import SnapshotError
from tierstore.onnx import join_inputs

RNG = np.random.default_rng(0)
N, ASKED, OF_TABLE, OWN = 400, 64, 3, 2
X = RNG.normal(size=(N, OF_TABLE + OWN)).astype(np.float32)
Y = X[:, 0] * 2 + X[:, 1] ** 2 + X[:, 3] + 3
BINARY, RARE = (np.quantile(Y, 0.5) < Y).astype(int), (np.quantile(Y, 0.9) < Y).astype(int)
CLASSES = np.digitize(Y, np.quantile(Y, [0.33, 0.66]))
TREES = 10


@dataclass
class Exported:
    """What a trainer's exporter wrote, and what the trainer's own model says of the first rows of `asked`."""

    graph: bytes
    output: str
    expected: Any
    asked: Any = None  # default X


def lacking(value: float) -> tuple[Any, Any]:
    """Rows whose last two numbers may be missing, and a target that depends on it."""
    x = X.copy()
    x[:, OF_TABLE:][np.random.default_rng(1).random((N, OWN)) < 0.3] = value
    missing = np.isnan(x[:, 3]) if np.isnan(value) else x[:, 3] == value
    return x, np.where(missing, 9.0, x[:, 0] + np.nan_to_num(x[:, 4]))


def types() -> Any:
    tools = pytest.importorskip("onnxmltools", reason="onnxmltools is not installed: make trainers")
    return [("x", tools.convert.common.data_types.FloatTensorType([None, OF_TABLE + OWN]))]


def lightgbm(target: Any, x: Any = X, *, output: str = "variable", linear: bool = False, **params: Any) -> Exported:
    lgb = pytest.importorskip("lightgbm", reason="LightGBM is not installed: make trainers")
    initial_types = types()
    options = {"verbose": -1, "num_leaves": 7, "min_data_in_leaf": 5, "num_threads": 1, **params}
    data = lgb.Dataset(x, target, params={"linear_tree": linear, "verbose": -1})
    booster = lgb.train(options, data, TREES)
    import onnxmltools

    graph = onnxmltools.convert_lightgbm(booster, initial_types=initial_types, zipmap=False)
    expected = booster.predict(x[:ASKED])
    if output == "probabilities" and expected.ndim == 1:
        expected = np.stack([1 - expected, expected], 1)
    return Exported(graph.SerializeToString(), output, expected, x)


def xgboost(
    kind: str, target: Any, *, ask: str = "predict", output: str = "variable", as_regressor: bool = False, **params: Any
) -> Exported:
    xgb = pytest.importorskip("xgboost", reason="XGBoost is not installed: make trainers")
    initial_types = types()
    model = getattr(xgb, kind)(n_estimators=TREES, max_depth=3, n_jobs=1, **params)
    model.fit(X, target, **({"group": [40] * 10} if kind == "XGBRanker" else {}))
    written = model.get_booster() if kind == "XGBRanker" else model
    if as_regressor:  # whose prediction is the margin, as a ranker's is
        document = json.loads(written.save_raw("json"))
        document["learner"]["objective"] = {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}}
        written = xgb.XGBRegressor()
        written.load_model(bytearray(json.dumps(document).encode()))
    import onnxmltools

    graph = onnxmltools.convert_xgboost(written, initial_types=initial_types)
    return Exported(graph.SerializeToString(), output, getattr(model, ask)(X[:ASKED]))


def catboost(kind: str, target: Any, *, output: str = "predictions", **params: Any) -> Exported:
    cat = pytest.importorskip("catboost", reason="CatBoost is not installed: make trainers")
    model = getattr(cat, kind)(iterations=TREES, depth=4, thread_count=1, allow_writing_files=False, **params)
    model.fit(X, target, verbose=False)
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        model.save_model(f"{scratch}/model.onnx", format="onnx")
        graph = Path(scratch, "model.onnx").read_bytes()
    ask = model.predict_proba if output == "probabilities" else model.predict
    return Exported(graph, output, ask(X[:ASKED]))


def scikit_learn(kind: str, target: Any, x: Any = X) -> Exported:
    skl2onnx = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed: make trainers")
    ensemble = pytest.importorskip("sklearn.ensemble")
    options = {"n_estimators": TREES, "random_state": 0} if kind == "RandomForestRegressor" else {"max_iter": TREES}
    model = getattr(ensemble, kind)(**options).fit(x, target)
    graph = skl2onnx.to_onnx(model, x[:1], target_opset=15)
    return Exported(graph.SerializeToString(), "variable", model.predict(x[:ASKED]), x)


def then(exported: Exported, *nodes: Any, **constants: float) -> Exported:
    """The same, with what the exporter forgot: nodes from `raw` to `score`, in place of the output."""
    import onnx

    model = onnx.ModelProto.FromString(exported.graph)
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["raw" if name == exported.output else name for name in node.output]
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info("score", onnx.TensorProto.FLOAT, ["rows", None]))
    graph.node.extend(nodes)
    held = [onnx.numpy_helper.from_array(np.float32(value), name) for name, value in constants.items()]
    graph.initializer.extend(held)
    if not any(opset.domain in ("", "ai.onnx") for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("", 13))
    return Exported(model.SerializeToString(), "score", exported.expected, exported.asked)


def with_attribute(exported: Exported, name: str, value: Callable[[dict[str, Any]], Any]) -> Exported:
    """The same with another attribute of its trees; `value` takes those that there are."""
    import onnx

    model = onnx.ModelProto.FromString(exported.graph)
    (trees,) = (node for node in model.graph.node if node.op_type.startswith("TreeEnsemble"))
    there = {of.name: onnx.helper.get_attribute_value(of) for of in trees.attribute}
    (old,) = (of for of in trees.attribute if of.name == name)
    old.CopyFrom(onnx.helper.make_attribute(name, value(there)))
    return replace(exported, graph=model.SerializeToString())


def load(tmp_path: Path, exported: Exported) -> dict[str, Any]:
    asked = (X if exported.asked is None else exported.asked)[:ASKED]
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=OF_TABLE).write(np.arange(ASKED), asked[:, :OF_TABLE])
        snapshot.feature("item_id", table="item")
        snapshot.dense(join_inputs(exported.graph, {"item_id": OF_TABLE, "own": OWN}))
        inputs = {"item_id": np.arange(ASKED), "own": asked[:, OF_TABLE:]}
        snapshot.golden(inputs, {exported.output: exported.expected})
    with in_process(), tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        found: dict[str, Any] = store.status()["models"]["ctr"]["versions"][0]["golden"]
        return found


Make = Callable[[], Exported]

RIGHT: dict[str, Make] = {
    "LightGBM regression": lambda: lightgbm(Y, objective="regression"),
    "LightGBM binary": lambda: lightgbm(BINARY, objective="binary", output="probabilities"),
    "LightGBM with missing values": lambda: lightgbm(*lacking(np.nan)[::-1], objective="regression"),
    "LightGBM poisson": lambda: lightgbm(np.abs(Y), objective="poisson"),
    "XGBRegressor": lambda: xgboost("XGBRegressor", Y),
    "XGBClassifier": lambda: xgboost("XGBClassifier", BINARY, ask="predict_proba", output="probabilities"),
    "XGBoost count:poisson": lambda: xgboost("XGBRegressor", np.abs(Y), objective="count:poisson"),
    "CatBoostRegressor": lambda: catboost("CatBoostRegressor", Y),
    "CatBoostClassifier": lambda: catboost("CatBoostClassifier", BINARY, output="probabilities"),
    "forest": lambda: scikit_learn("RandomForestRegressor", Y),
    "HistGradientBoosting with missing values": lambda: scikit_learn("HistGradientBoostingRegressor", *lacking(np.nan)[::-1]),
}  # fmt: skip
WRONG: dict[str, Make] = {
    "LightGBM sigmoid": lambda: lightgbm(BINARY, objective="binary", sigmoid=2.0, output="probabilities"),
    "LightGBM rf": lambda: lightgbm(Y, objective="regression", boosting="rf", bagging_freq=1, bagging_fraction=0.7),
    "LightGBM linear_tree": lambda: lightgbm(Y, objective="regression", linear=True, linear_tree=True),
    "LightGBM zero_as_missing": lambda: lightgbm(*lacking(0.0)[::-1], objective="regression", zero_as_missing=True),
    "LightGBM multiclassova": lambda: lightgbm(CLASSES, objective="multiclassova", num_class=3, output="probabilities"),
    "LightGBM reg_sqrt": lambda: lightgbm(Y, objective="regression", reg_sqrt=True),
    "XGBoost reg:logistic": lambda: xgboost("XGBRegressor", BINARY, objective="reg:logistic"),
    "XGBoost binary:logistic": lambda: xgboost("XGBRegressor", BINARY, objective="binary:logistic"),
    "XGBoost survival:cox": lambda: xgboost("XGBRegressor", np.abs(Y) + 0.1, objective="survival:cox"),
    "XGBoost multi:softmax": lambda: xgboost("XGBClassifier", CLASSES, objective="multi:softmax", ask="predict_proba", output="probabilities"),
    "XGBoost several targets": lambda: xgboost("XGBRegressor", np.stack([Y, -Y], 1)),
    "XGBRanker's booster": lambda: xgboost("XGBRanker", CLASSES, output="probabilities"),
    "CatBoost boost_from_average": lambda: catboost("CatBoostClassifier", RARE, boost_from_average=True, output="probabilities"),
    "CatBoost Poisson": lambda: catboost("CatBoostRegressor", np.abs(Y), loss_function="Poisson"),
    "CatBoost Tweedie": lambda: catboost("CatBoostRegressor", np.abs(Y), loss_function="Tweedie:variance_power=1.5"),
    "forest with missing values": lambda: scikit_learn("RandomForestRegressor", *lacking(np.nan)[::-1]),
}  # fmt: skip
UNBASED = [om.node("Sub", "raw base", "margin"), om.node("Sigmoid", "margin", "score")]  # half are 1: no base
SHARPER = [om.node("Mul", "raw raw", "sharp"), om.node("ReduceSum", "sharp", "both", axes=[1]), om.node("Div", "sharp both", "score")]  # fmt: skip
UNROOTED = [om.node("Abs", "raw", "size"), om.node("Mul", "raw size", "score")]
# the trees of the same model, with what the exporter forgot; of another objective or without the option where it cannot be said in trees
MENDED: dict[str, Make] = {
    "LightGBM sigmoid": lambda: then(WRONG["LightGBM sigmoid"](), *SHARPER),
    "LightGBM rf": lambda: then(WRONG["LightGBM rf"](), om.node("Div", "raw trees", "score"), trees=TREES),
    "LightGBM linear_tree": lambda: lightgbm(Y, objective="regression"),
    "LightGBM zero_as_missing": lambda: lightgbm(*lacking(np.nan)[::-1], objective="regression"),
    "LightGBM multiclassova": lambda: with_attribute(WRONG["LightGBM multiclassova"](), "post_transform", lambda _: "LOGISTIC"),
    "LightGBM reg_sqrt": lambda: then(WRONG["LightGBM reg_sqrt"](), *UNROOTED),
    "XGBoost reg:logistic": lambda: then(WRONG["XGBoost reg:logistic"](), *UNBASED, base=BINARY.mean()),
    "XGBoost binary:logistic": lambda: then(WRONG["XGBoost binary:logistic"](), *UNBASED, base=BINARY.mean()),
    "XGBoost survival:cox": lambda: then(WRONG["XGBoost survival:cox"](), om.node("Sub", "raw one", "margin"), om.node("Exp", "margin", "score"), one=1.0),
    "XGBoost multi:softmax": lambda: then(WRONG["XGBoost multi:softmax"](), om.node("Softmax", "raw", "score")),
    "XGBoost several targets": lambda: with_attribute(WRONG["XGBoost several targets"](), "target_ids", lambda of: [tree % 2 for tree in of["target_treeids"]]),
    "XGBRanker's booster": lambda: xgboost("XGBRanker", CLASSES, as_regressor=True),
    "CatBoost boost_from_average": lambda: with_attribute(WRONG["CatBoost boost_from_average"](), "class_weights", lambda of: [-one for one in of["class_weights"]]),
    "CatBoost Poisson": lambda: then(WRONG["CatBoost Poisson"](), om.node("Exp", "raw", "score")),
    "CatBoost Tweedie": lambda: then(WRONG["CatBoost Tweedie"](), om.node("Exp", "raw", "score")),
    "forest with missing values": lambda: scikit_learn("HistGradientBoostingRegressor", *lacking(np.nan)[::-1]),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_exported_rightly_is_taken(tmp_path: Path, case: str) -> None:
    assert load(tmp_path, RIGHT[case]())["held"] == 1


@pytest.mark.parametrize("case", WRONG)
def test_what_is_exported_wrongly_is_refused_and_the_difference_named(tmp_path: Path, case: str) -> None:
    exported = WRONG[case]()
    with pytest.raises(SnapshotError, match=rf"golden example 0: output '{exported.output}': .*expected"):
        load(tmp_path, exported)


@pytest.mark.parametrize("case", WRONG)
def test_the_same_is_taken_once_it_is_written_rightly(tmp_path: Path, case: str) -> None:
    assert load(tmp_path, MENDED[case]())["held"] == 1


def test_a_ranker_of_xgboost_itself_does_not_convert() -> None:
    xgb = pytest.importorskip("xgboost", reason="XGBoost is not installed: make trainers")
    initial_types = types()
    import onnxmltools

    ranker = xgb.XGBRanker(n_estimators=2, n_jobs=1).fit(X, CLASSES, group=[40] * 10)
    with pytest.raises(ValueError, match="XGBRanker"):
        onnxmltools.convert_xgboost(ranker, initial_types=initial_types)


def test_rows_and_scores_of_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="Keras is not installed: make trainers")
    pytest.importorskip("torch")
    item = keras.Input((), dtype="int64", name="item_id")
    embedding, top = keras.layers.Embedding(50, 8), keras.layers.Dense(1, activation="sigmoid")
    net = keras.Model(item, top(embedding(item)))
    net.compile("adagrad", "binary_crossentropy")
    before = np.array(embedding.get_weights()[0])
    keys = np.arange(50)
    net.fit(keys, (keys % 3 == 0).astype("float32"), epochs=3, verbose=0)
    weights, bias = (np.asarray(of) for of in top.get_weights())
    graph = then(Exported(om.linear({"item_id": weights[:, 0]}, float(bias[0]), output="raw"), "raw", None), om.node("Sigmoid", "raw", "score"))  # fmt: skip
    scores = net.predict(keys[:16], verbose=0)
    for version, rows in enumerate((np.asarray(embedding.get_weights()[0]), before), 1):
        with tierstore.SnapshotWriter(tmp_path / str(version), model="ctr", version=version) as snapshot:
            snapshot.table("item", dim=8).write(keys, rows)
            snapshot.feature("item_id", table="item")
            snapshot.dense(graph.graph)
            snapshot.golden(
                {"item_id": keys[:16]}, {"score": scores, "item_id": np.asarray(embedding(keys[:16]).detach())}
            )
    with in_process(), tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "1")
        with pytest.raises(SnapshotError, match=r"'score'|'item_id'"):  # rows as they were before the last fit
            store.load_snapshot(tmp_path / "2")
