"""A feature with a trainer's function has the rows that the trainer itself gives to keys.

The fixed rows were made by Keras 3.15.1, TensorFlow 2.21.0, Spark 4.3.0, scikit-learn 1.9.1, Vowpal Wabbit 9.11.9, FBGEMM
1.8.0, PaddlePaddle 3.3.1 and Java 17. Where a package is installed, many keys are compared with it: with large counts a million.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tierstore
from tests.counts import few_or_many
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.types import KeyType, TrainerHash

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
WORDS = [
    *("", "a", "17", "007", "-3", "item-17", "café", "😀", "早上好"),
    *(TEXT[:size] for size in (16, 17, 32, 33, 64, 65, 100, 128, 129)),
]
IDS = [0, 1, -1, 17, 255, -(1 << 31), (1 << 31) - 1]
WIDE = [1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)]
N = 999_999_937
MANY = few_or_many(1 << 16, 1 << 20)
MODS = {"vowpal_wabbit": 1 << 30}  # of its own; of the others N
KEYS = {"string": WORDS, "int64": IDS + WIDE}

# by function, type of the keys and options: the rows that the packages gave to WORDS, or to IDS and WIDE
ROWS_OF: list[tuple[str, str, dict[str, Any], list[int]]] = [
    ("tensorflow", "string", {}, [134485254, 631074151, 324230470, 852185475, 322114381, 86518535, 767194724, 893097187, 626925639, 779270728, 392951763, 156567710, 307315042, 120630422, 533266767, 885977733, 435830323, 112799759]),
    ("tensorflow", "string", {"salt": [133, 137]}, [258249343, 32089200, 749612964, 795872062, 77405259, 583280909, 744150604, 399271573, 439544649, 577201809, 385469458, 254042750, 754651370, 933853990, 900595657, 273918832, 306807051, 845695495]),
    ("tensorflow", "string", {"mask": "17"}, [294804816, 548879908, 0, 661965917, 567682996, 881975081, 146573892, 535399284, 526280248, 100120278, 778345406, 296213667, 772252439, 263345569, 864253949, 341242547, 984533851, 206470675]),
    ("tensorflow_v1", "string", {}, [744133404, 159420790, 193161951, 170508241, 202639149, 679716730, 990481597, 358455143, 534584171, 823617695, 145897186, 55897844, 549815510, 404862181, 539926135, 72871229, 769843290, 665309034]),
    ("tensorflow", "int64", {}, [787697351, 769013356, 185184231, 324230470, 382919091, 676740558, 128625465, 437007886, 303963750, 522625424, 294992128]),
    ("tensorflow", "int64", {"salt": [133, 137]}, [246591630, 810634975, 374383953, 749612964, 259968663, 566260219, 740639166, 831949452, 463529185, 238137031, 831854355]),
    ("tensorflow", "int64", {"mask": 17}, [986668544, 73172386, 519059407, 0, 918801182, 197128310, 438116022, 822952519, 782022891, 262460592, 788424225]),
    ("tensorflow_v1", "int64", {}, [227737239, 482457099, 770958189, 193161951, 115204823, 226362240, 226910184, 217140924, 710271916, 614308531, 583013594]),
    ("vowpal_wabbit", "string", {"namespace": "item"}, [296890110, 837574249, 296890127, 296890117, 217411255, 1044809451, 457085880, 59261632, 676583314, 815221736, 799891143, 792835711, 514553921, 727107547, 727107547, 759667682, 767009342, 223476738]),
    ("vowpal_wabbit", "int64", {"namespace": "item"}, [296890110, 296890111, 531058146, 296890127, 296890365, 892028742, 296890109, 296890110, 296890110, 296890109, 1041328760]),
    ("sklearn", "string", {}, [0, 9084913, 852771139, 359640054, 405203247, 1058811743, 605818632, 1095487750, 85559158, 1678424259, 1664755526, 1917271052, 1248024824, 757966074, 599339415, 1091094523, 185955722, 1777385629]),
    ("sklearn", "string", {"alternate_sign": False}, [0, 9084913, 852771139, 359640054, 405203247, 58811806, 605818632, 95487813, 85559158, 678424322, 664755589, 917271115, 248024887, 757966074, 599339415, 91094586, 185955722, 777385692]),
    ("sklearn", "string", {"prefix": "f="}, [1132144548, 1852149034, 559396192, 1519102575, 673090387, 1140690393, 1244158014, 536134319, 1062186075, 1010050252, 1301916214, 628754507, 1032120584, 461606881, 1603316870, 1667449674, 728211229, 637374732]),
    ("sklearn", "int64", {}, [1764297026, 1810453357, 908024521, 852771139, 1917962552, 1037542516, 1819647237, 702538073, 1786605009, 177519188, 868142273]),
    ("spark_hash", "string", {}, [142593372, 485273233, 970338725, 277867860, 363023496, 934925451, 639121846, 877935442, 319566528, 374541967, 626570798, 257087084, 890034038, 705654777, 972901097, 953265889, 564705576, 806796031]),
    ("spark_xxhash64", "string", {}, [822420721, 568192906, 574164921, 57674387, 225085308, 323101545, 308335246, 284945204, 14733298, 74864912, 630146537, 678121095, 903264021, 315975861, 285765236, 265333072, 736112831, 668681154]),
    ("spark_xxhash64", "string", {"absolute": True}, [177579216, 431807031, 574164921, 57674387, 225085308, 676898392, 308335246, 715054733, 14733298, 74864912, 369853400, 321878842, 903264021, 315975861, 714234701, 265333072, 263887106, 668681154]),
    ("spark_hash", "int64", {}, [329075679, 287680543, 60509930, 546268321, 385779847, 110891125, 923336945, 238268309, 403232187, 395374845, 146353852]),
    ("spark_xxhash64", "int64", {}, [995049166, 191550567, 313409095, 776991383, 189844142, 534475047, 973541752, 243045767, 866921662, 826137707, 329280634]),
    ("spark_xxhash64", "int64", {"absolute": True}, [4950771, 808449370, 313409095, 776991383, 810155795, 465524890, 973541752, 756954170, 866921662, 173862230, 670719303]),
    ("spark_hash", "int64", {"bits": 32}, [933211791, 440418980, 395223487, 644457563, 326673542, 723455942, 133916647]),
    ("spark_xxhash64", "int64", {"bits": 32}, [646435819, 197322245, 493801439, 957048608, 918360219, 585797475, 848921772]),
    ("spark_ml", "string", {}, [142593372, 706426341, 439872590, 225751690, 514267857, 431530200, 312538124, 877935442, 147799515, 374541967, 218107654, 257087084, 57154702, 705654777, 881109264, 953265889, 564705576, 937834378]),
    ("spark_ml", "string", {"prefix": "f="}, [996670756, 501001035, 23582406, 139541378, 379953404, 586092078, 537995683, 834039961, 548063403, 856659619, 503615609, 738921050, 349943370, 238375623, 136849816, 566382921, 519628637, 741085484]),
    ("spark_ml", "int64", {"prefix": "f="}, [389663606, 280508156, 599945733, 23582406, 270532319, 204672146, 210408206, 404390451, 501690336, 857228867, 686978073]),
    ("java", "string", {}, [0, 97, 1574, 47671, 1446, 116155294, 3045921, 1772899, 25713756, 570566316, 507686714, 832288449, 95911209, 196786813, 445683492, 78767329, 412691297, 843755415]),
    ("java", "int64", {}, [0, 1, 0, 17, 255, 147483773, 147483773, 852516163, 256, 852516163, 852516163]),
    ("java", "int64", {"bits": 32}, [0, 1, 999999936, 17, 255, 852516163, 147483773]),
]  # fmt: skip


def rows(function: str, keys: Any, key: str = "int64", mod: int | None = None, **options: Any) -> Any:
    how = {"function": function, "mod": MODS.get(function, N) if mod is None else mod, "key": key, **options}
    return tierstore.row_numbers(keys, how)


@pytest.mark.parametrize(("function", "key", "options", "wanted"), ROWS_OF)
def test_keys_have_the_rows_of_the_trainer(function: str, key: str, options: dict[str, Any], wanted: list[int]) -> None:
    keys = IDS if options.get("bits") == 32 else KEYS[key]
    assert rows(function, keys, key, **options).tolist() == wanted
    if key == "int64":
        assert rows(function, np.array(keys, np.int64)[::-1], key, **options).tolist() == wanted[::-1]
    else:
        sliced = pa.array(["before", *keys], pa.string())[1:]
        assert rows(function, sliced, key, **options).tolist() == wanted
        assert rows(function, np.array(keys), key, **options).tolist() == wanted


def test_numbers_are_hashed_as_paddle_does() -> None:
    ids = [0, 1, -1, 17, 1 << 40]
    assert rows("paddle", ids, mod=1000).tolist() == [579, 269, 761, 112, 771]
    assert rows("paddle", ids, mod=1000, seed=1).tolist() == [55, 609, 349, 164, 629]
    assert rows("paddle", ids[:4], mod=1000, bits=32).tolist() == [372, 897, 635, 826]


def test_an_id_without_a_sign_is_hashed_as_its_own_decimal_text() -> None:
    ids = [0, 17, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    for function in ("tensorflow", "tensorflow_v1", "spark_ml", "sklearn", "vowpal_wabbit", "flink_ml"):
        as_text = rows(function, list(map(str, ids)), "string")
        assert rows(function, np.array(ids, np.uint64), "uint64").tolist() == as_text.tolist(), function


def test_flink_hashes_the_units_of_utf_16() -> None:
    murmur = pytest.importorskip("sklearn.utils", reason="scikit-learn is not installed").murmurhash3_32
    wanted = [abs(int(murmur(f"c={word}".encode("utf-16-le"), 0))) % N for word in WORDS]
    assert rows("flink_ml", WORDS, "string", prefix="c=").tolist() == wanted


def test_the_most_negative_hash_has_a_row() -> None:
    """Text of which Java's hash is -2^31: its absolute value in 32 bits is below 0."""
    assert rows("java", ["polygenelubricants"], "string", mod=7).tolist() == [-(1 << 31) % 7]
    assert rows("java", ["polygenelubricants"], "string", mod=7, absolute=True).tolist() == [(1 << 31) % 7]


def test_no_key_has_no_row() -> None:
    for key in ("int64", "uint64", "string"):
        assert rows("tensorflow", [], key).tolist() == []
    assert rows("tensorflow", np.empty(0, np.int64)).dtype == np.int64


def test_a_key_of_more_bits_than_the_hash_is_refused() -> None:
    for key in (1 << 31, -(1 << 31) - 1):
        with pytest.raises(InvalidInput, match=rf"expected keys of 32 bits.*got {key}"):
            rows("spark_hash", [1, key], bits=32)
    with pytest.raises(InvalidInput, match="expected string keys"):
        rows("spark_hash", [1, 2], "string")
    with pytest.raises(InvalidInput, match="expected int64 keys"):
        rows("tensorflow", ["1", "2"])


def manifest(how: object) -> Manifest:
    table = {"name": "item", "dim": 2, "dtype": "float32", "rows": 0, "shards": ()}
    return Manifest.create(
        model="m", version=1, tables=(table,), features=({"name": "f", "table": "item", "hash": how},)
    )


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"mod": 5, "function": "keras"}, "function: expected one of flink_ml, java"),
        ({"mod": 5, "mask": 1}, "mask: of no use without a function"),
        ({"mod": 5, "function": "java", "mask": 1}, "mask: not an option of java, which takes absolute, bits"),
        ({"mod": 5, "function": "tensorflow", "seed": 1}, "seed: not an option of tensorflow, which takes mask, salt"),
        ({"mod": 5, "function": "torchrec_zch_home", "seed": 1}, "seed: not an option of .*, which takes none"),
        ({"mod": 5, "function": "tensorflow", "salt": [1]}, r"salt"),
        ({"mod": 5, "function": "tensorflow", "salt": [1, -1]}, r"salt\[1\]"),
        ({"mod": 5, "function": "tensorflow", "mask": "a"}, "mask: expected an int64 key, got 'a'"),
        ({"mod": 1, "function": "tensorflow", "mask": 1}, "mod: expected 2 or more with a mask"),
        ({"mod": 5, "function": "paddle", "key": "string"}, "key: paddle hashes int64 keys, got string"),
        ({"mod": 5, "function": "spark_hash", "key": "uint64"}, "key: spark_hash hashes int64 or string keys"),
        ({"mod": 5, "function": "spark_hash", "key": "string", "bits": 32}, "bits: strings have none"),
        ({"mod": 5, "function": "spark_hash", "bits": 16}, "bits"),
        ({"mod": 100, "function": "vowpal_wabbit"}, r"mod: expected 2\^b, as Vowpal Wabbit's -b says, got 100"),
        ({"mod": 1 << 62, "function": "sklearn"}, r"mod: expected at most 2\^61"),
        ({"mod": 5, "function": "sklearn", "prefix": "c" * 257}, "prefix"),
    ],
)
def test_a_declaration_that_no_trainer_has_is_refused(how: object, says: str) -> None:
    with pytest.raises(SnapshotError, match=rf"features\[0\]\.hash\.{says}"):
        manifest(how)
    with pytest.raises(InvalidInput, match=says):
        tierstore.row_numbers([1], how)  # type: ignore[arg-type]


def test_a_manifest_keeps_a_declaration() -> None:
    how = {"function": "tensorflow", "mod": 9, "salt": [(1 << 64) - 1, 2], "mask": "", "key": "string"}
    again = Manifest.parse(__import__("json").dumps(manifest(how).to_document()))
    assert again == manifest(how)
    spec = again.feature_specs()["f"].hash
    assert spec == TrainerHash("tensorflow", 9, KeyType.STRING, salt=((1 << 64) - 1, 2), mask="")
    assert spec.document() == {**how, "salt": ((1 << 64) - 1, 2)}
    assert "function" not in manifest({"mod": 5}).to_document()["features"][0]["hash"]


def test_only_objects_that_hash_are_like_a_hash() -> None:
    with pytest.raises(InvalidInput, match="expected one of Hashing of keras, FeatureHasher of sklearn"):
        tierstore.hash_like(object())


# --- many keys beside the packages


def many_keys() -> tuple[list[str], np.ndarray]:
    """Texts of 0 to 300 bytes, mostly ASCII, and ids of all magnitudes."""
    rng = np.random.default_rng(11)
    sizes = np.where(rng.random(MANY) < 0.9, rng.integers(0, 40, MANY), rng.integers(0, 300, MANY))
    letters = bytes(rng.integers(32, 127, 2 * MANY, np.uint8)).decode()
    starts = rng.integers(0, 2 * MANY - 300, MANY)
    texts = [letters[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    texts[::50] = [f"{text[:20]}é早😀{text[20:]}" for text in texts[::50]]
    ids = rng.integers(-(1 << 63), 1 << 63, MANY, np.int64) >> rng.integers(0, 64, MANY)
    texts[1::50] = list(map(str, ids[1::50].tolist()))
    return texts, ids


@pytest.mark.thorough
def test_many_keys_as_tensorflow_and_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    layer = pytest.importorskip("keras", reason="Keras is not installed").layers.Hashing
    texts, ids = many_keys()
    for keys, key, mask in ((texts, "string", texts[7]), (ids, "int64", int(ids[7]))):
        tensor = tf.constant(keys)
        for options in (
            {},
            {"salt": [3, 1 << 40]},
            {"salt": 7},
            {"mask_value": mask},
            {"mask_value": mask, "salt": [5, 6]},
        ):
            trained = layer(N, **options)
            how = tierstore.hash_like(trained, key=key)
            np.testing.assert_array_equal(tierstore.row_numbers(keys, how), np.asarray(trained(tensor)), str(how))
        words = tensor if key == "string" else tf.as_string(tensor)
        np.testing.assert_array_equal(rows("tensorflow", keys, key), tf.strings.to_hash_bucket_fast(words, N).numpy())
        np.testing.assert_array_equal(rows("tensorflow_v1", keys, key), tf.strings.to_hash_bucket(words, N).numpy())


@pytest.mark.thorough
def test_many_keys_as_scikit_learn() -> None:
    hasher = pytest.importorskip("sklearn.feature_extraction", reason="scikit-learn is not installed").FeatureHasher
    texts, ids = many_keys()
    for keys, key in ((texts, "string"), (ids, "int64")):
        words = list(map(str, keys))
        for kind, column in (("string", None), ("dict", "c")):
            examples = [[word] for word in words] if kind == "string" else [{"c": word} for word in words]
            for alternates in (True, False):
                trained = hasher(N, input_type=kind, alternate_sign=alternates)
                matrix = trained.transform(examples)
                wanted = matrix.indices.astype(np.int64) + np.where(matrix.data < 0, N, 0)
                how = tierstore.hash_like(trained, key=key, column=column)
                np.testing.assert_array_equal(tierstore.row_numbers(keys, how), wanted, str(how))
    with pytest.raises(InvalidInput, match="column: expected the name of the column"):
        tierstore.hash_like(hasher(N))


@pytest.mark.thorough
def test_many_keys_as_vowpal_wabbit() -> None:
    workspace = pytest.importorskip("vowpalwabbit", reason="Vowpal Wabbit is not installed").Workspace
    texts, ids = many_keys()
    trained = workspace("-b 28 --quiet")
    for namespace in ("item", "17"):
        space = trained.hash_space(namespace)
        for keys, key in ((texts, "string"), (ids, "int64")):
            wanted = [trained.hash_feature(word, space) % (1 << 28) for word in map(str, keys)]
            assert rows("vowpal_wabbit", keys, key, mod=1 << 28, namespace=namespace).tolist() == wanted


@pytest.mark.thorough
def test_many_ids_as_fbgemm() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed")
    _, ids = many_keys()
    empty = torch.full((1_000_003, 1), -1, dtype=torch.int64)
    homes = torch.ops.fbgemm.zero_collision_hash(
        input=torch.from_numpy(ids), identities=empty, max_probe=128, circular_probe=True, exp_hours=-1, readonly=True
    )[0]
    np.testing.assert_array_equal(rows("torchrec_zch_home", ids, mod=1_000_003), homes.numpy())


SPARK = """
import sys
from pyspark.ml.feature import FeatureHasher, HashingTF
from pyspark.sql import SparkSession, functions as F

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
n = F.lit(int(sys.argv[2]))
frame = spark.read.parquet(sys.argv[1] + "/keys.parquet")
of = [frame["i"]]
for name in ("text", "id", "narrow"):
    for function in ("hash", "xxhash64"):
        hashed = getattr(F, function)(name)
        of += [F.pmod(hashed, n).cast("long").alias(f"{name} {function}")]
        of += [(F.abs(hashed.cast("long")) % n).cast("long").alias(f"{name} {function} absolute")]
frame.select(*of).coalesce(1).write.parquet(sys.argv[1] + "/rows")
some = frame.where("i < 10000").coalesce(1)
places = F.udf(lambda vector: int(vector.indices[0]), "long")
tf = HashingTF(numFeatures=int(sys.argv[2]), inputCol="words", outputCol="tf")
some = tf.transform(some.withColumn("words", F.array("text")))
for name in ("text", "id"):
    some = FeatureHasher(
        numFeatures=int(sys.argv[2]), inputCols=[name], outputCol=f"{name} v", categoricalCols=[name]
    ).transform(some)
some.select("i", *(places(column).alias(column) for column in ("tf", "text v", "id v"))).write.parquet(sys.argv[1] + "/ml")
"""


@pytest.mark.thorough
def test_many_keys_as_spark(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="Spark is not installed")
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    texts, ids = many_keys()
    narrow = ids.astype(np.int32)
    keys = {"i": np.arange(len(ids)), "text": pa.array(texts, pa.string()), "id": ids, "narrow": narrow}
    pq.write_table(pa.table(keys), tmp_path / "keys.parquet")
    program = [sys.executable, "-c", SPARK, str(tmp_path), str(N)]
    subprocess.run(program, check=True, timeout=600, env=dict(__import__("os").environ, PYSPARK_PYTHON=sys.executable))
    found = pq.read_table(tmp_path / "rows").sort_by("i")
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "text": (texts, {"key": "string"}), "id": (ids, {}), "narrow": (narrow.astype(np.int64), {"bits": 32}),
    }  # fmt: skip
    for name, (given, options) in kinds.items():
        for function in ("hash", "xxhash64"):
            got = rows(f"spark_{function}", given, **options)
            np.testing.assert_array_equal(got, found[f"{name} {function}"].to_numpy())
            got = rows(f"spark_{function}", given, **options, absolute=True)
            np.testing.assert_array_equal(got, found[f"{name} {function} absolute"].to_numpy())
    few = pq.read_table(tmp_path / "ml").sort_by("i")
    assert rows("spark_ml", texts[:10_000], "string").tolist() == few["tf"].to_pylist()
    assert rows("spark_ml", texts[:10_000], "string", prefix="text=").tolist() == few["text v"].to_pylist()
    assert rows("spark_ml", ids[:10_000], prefix="id=").tolist() == few["id v"].to_pylist()


JAVA = """
import java.nio.file.*;
import java.util.*;

public class Rows {
    public static void main(String[] args) throws Exception {
        int n = Integer.parseInt(args[1]);
        StringBuilder out = new StringBuilder();
        for (String text : Files.readAllLines(Path.of(args[0], "texts")))
            out.append(Math.floorMod(text.hashCode(), n)).append('\\n');
        for (String id : Files.readAllLines(Path.of(args[0], "ids"))) {
            long wide = Long.parseLong(id);
            out.append(Math.floorMod(Long.hashCode(wide), n)).append('\\n');
            out.append(Math.floorMod(Integer.hashCode((int) wide), n)).append('\\n');
        }
        Files.writeString(Path.of(args[0], "rows"), out);
    }
}
"""


@pytest.mark.thorough
def test_many_keys_as_java(tmp_path: Path) -> None:
    java = shutil.which("java")
    if java is None:
        pytest.skip("Java is not installed")
    texts, ids = many_keys()
    (tmp_path / "Rows.java").write_text(JAVA)
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    (tmp_path / "ids").write_text("".join(f"{key}\n" for key in ids.tolist()))
    subprocess.run([java, tmp_path / "Rows.java", tmp_path, str(N)], check=True, timeout=300)
    found = np.loadtxt(tmp_path / "rows", np.int64)
    np.testing.assert_array_equal(rows("java", texts, "string"), found[: len(texts)])
    np.testing.assert_array_equal(rows("java", ids), found[len(texts) :: 2])
    narrow = ids.astype(np.int32).astype(np.int64)
    np.testing.assert_array_equal(rows("java", narrow, bits=32), found[len(texts) + 1 :: 2])
