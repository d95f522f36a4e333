"""Settings: who wins over whom, and that a slip in a name or a value is an error that says where."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from tierstore import config
from tierstore.config import CLIENT_ENV, ENV_PREFIX, Settings, described_settings, load_settings
from tierstore.errors import ConfigError, InvalidInput


@pytest.fixture(autouse=True)
def _bare_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No TIERSTORE_ variable and no tierstore.toml but those that a test makes."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


def test_defaults_need_no_source() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.data) == ("127.0.0.1", 8000, Path("data"))
    assert settings.source_root == [Path.cwd()]
    assert 0 < settings.host_budget <= 4 << 30


def test_the_last_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tierstore.toml").write_text("port = 1\n")
    assert load_settings().port == 1, "the file wins over the default"
    monkeypatch.setenv("TIERSTORE_PORT", "2")
    assert load_settings().port == 2, "the environment wins over the file"
    assert load_settings(port=3).port == 3, "a keyword wins over the environment"


def test_sources_fill_in_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tierstore.toml").write_text('port = 1\nhost = "::1"\n')
    monkeypatch.setenv("TIERSTORE_PORT", "2")
    settings = load_settings(threads=3)
    assert (settings.port, settings.host, settings.threads) == (2, "::1", 3)


def test_a_keyword_of_none_counts_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_PORT", "2")
    assert load_settings(port=None).port == 2


def test_a_named_file_is_read_instead_of_the_one_beside_us(tmp_path: Path) -> None:
    (tmp_path / "tierstore.toml").write_text("port = 1\n")
    (tmp_path / "other.toml").write_text("threads = 4\n")
    settings = load_settings(tmp_path / "other.toml")
    assert (settings.port, settings.threads) == (8000, 4)


@pytest.mark.parametrize("name", config._REPLACED)
def test_a_setting_that_is_gone_says_what_has_replaced_it(name: str, tmp_path: Path) -> None:
    """And it names a setting that there is, unless it is a constant."""
    (tmp_path / "tierstore.toml").write_text(f"{name} = 1\n")
    with pytest.raises(ConfigError, match=rf"unknown setting in tierstore\.toml: {name} \(") as refused:
        load_settings()
    assert name not in Settings.model_fields
    words = set(re.findall(r"[a-z_]+", str(refused.value).partition("(")[2]))
    assert "constant" in words or words & Settings.model_fields.keys()


@pytest.mark.parametrize("name", ["TIERSTORE_HOST", "tierstore_host", "Tierstore_Host"])
def test_variables_win_over_the_file_in_any_case(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tierstore.toml").write_text('host = "127.0.0.2"\n')
    monkeypatch.setenv(name, "127.0.0.3")
    assert load_settings().host == "127.0.0.3"


def test_an_empty_variable_counts_as_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tierstore.toml").write_text("port = 1\n")
    monkeypatch.setenv("TIERSTORE_PORT", "")
    assert load_settings().port == 1


def test_an_unknown_name_is_refused_by_name_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown setting in the arguments: host_budgte \(did you mean host_budget\?\);"
    ):
        load_settings(host_budgte="4GiB")
    monkeypatch.setenv("TIERSTORE_HOST_BUDGTE", "4GiB")
    with pytest.raises(ConfigError, match=r"TIERSTORE_HOST_BUDGTE \(did you mean TIERSTORE_HOST_BUDGET\?\);"):
        load_settings(strict_environment=True)
    monkeypatch.delenv("TIERSTORE_HOST_BUDGTE")
    (tmp_path / "tierstore.toml").write_text("host_budgte = 1\n")
    with pytest.raises(ConfigError, match=r"unknown setting in tierstore\.toml: host_budgte"):
        load_settings()
    (tmp_path / "tierstore.toml").unlink()
    with pytest.raises(ConfigError, match=r"arguments: colour;"):
        load_settings(colour=1)


def test_an_unknown_variable_is_a_warning_that_names_the_nearest_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setenv("TIERSTORE_HOST_BUDGTE", "4GiB")
    monkeypatch.setenv("TIERSTORE_OF_A_LATER_RELEASE", "1")
    for _ in range(2):
        assert load_settings(port=1).port == 1
    assert caplog.messages == [
        "TIERSTORE_HOST_BUDGTE (did you mean TIERSTORE_HOST_BUDGET?) sets nothing in this release",
        "TIERSTORE_OF_A_LATER_RELEASE sets nothing in this release",
    ]
    for switch in ("environment", "file"):
        if switch == "file":
            monkeypatch.delenv("TIERSTORE_STRICT_ENVIRONMENT")
            Path("tierstore.toml").write_text("strict_environment = true\n")
        else:
            monkeypatch.setenv("TIERSTORE_STRICT_ENVIRONMENT", "1")
        with pytest.raises(ConfigError, match="unknown setting in the environment: TIERSTORE_HOST_BUDGTE"):
            load_settings()


def test_what_the_command_line_reads_for_itself_is_not_an_unknown_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLIENT_ENV:
        assert name not in Settings.model_fields
        monkeypatch.setenv(ENV_PREFIX + name.upper(), "x")
    assert load_settings().port == 8000


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("10GB", 10**10), ("4096", 4096), (4096, 4096)],
)
def test_sizes_take_units(given: str | int, nbytes: int) -> None:
    assert load_settings(host_budget=given).host_budget == nbytes


def test_sizes_take_units_from_the_environment_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tierstore.toml").write_text('overlay_budget = "64MiB"\n')
    monkeypatch.setenv("TIERSTORE_HOST_BUDGET", "1GiB")
    settings = load_settings()
    assert (settings.overlay_budget, settings.host_budget) == (64 << 20, 1 << 30)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_budget", "4 gigs"),
        ("host_budget", 0),
        ("host_budget", "-1GiB"),
        ("port", 65536),
        ("port", "http"),
        ("threads", 0),
        ("threads", 65),
        ("fold_grace_s", -1),
        ("allow_client_shm", "perhaps"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_setting(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"bad setting: {name}: ") as refusal:
        load_settings(**{name: value})
    assert isinstance(refusal.value, InvalidInput)
    assert "\n" not in str(refusal.value)


def test_a_bad_variable_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_THREADS", "many")
    with pytest.raises(ConfigError, match="threads"):
        load_settings()


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_settings(port=-1, threads=0)
    assert "port: " in str(refusal.value)
    assert "threads: " in str(refusal.value)


def test_a_file_that_is_not_toml_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("port: 8000\n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_settings(tmp_path / "broken.toml")


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_settings(tmp_path / "missing.toml")


def test_source_roots_are_split_like_a_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_SOURCE_ROOT", os.pathsep.join(["/a", "/b c"]))
    assert load_settings().source_root == [Path("/a"), Path("/b c")]
    assert load_settings(source_root=["/d"]).source_root == [Path("/d")]
    monkeypatch.setenv("TIERSTORE_SOURCE_ROOT", "s3://b/x:/a:gs://c")
    assert load_settings().source_root == ["s3://b/x", Path("/a"), "gs://c"]


def test_settings_do_not_change_once_made() -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    "variables",
    [
        {  # what Kubernetes sets for a service named `tierstore`
            "TIERSTORE_SERVICE_HOST": "10.0.0.7",
            "TIERSTORE_SERVICE_PORT": "8000",
            "TIERSTORE_SERVICE_PORT_HTTP": "8000",
            "TIERSTORE_PORT": "tcp://10.0.0.7:8000",
            "TIERSTORE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
            "TIERSTORE_PORT_8000_TCP_PROTO": "tcp",
            "TIERSTORE_PORT_8000_TCP_PORT": "8000",
            "TIERSTORE_PORT_8000_TCP_ADDR": "10.0.0.7",
        },
        {  # and for one named `tierstore-grpc`, or `tierstore-a`
            "TIERSTORE_GRPC_SERVICE_HOST": "10.0.0.8",
            "TIERSTORE_GRPC_PORT": "tcp://10.0.0.8:8001",
            "TIERSTORE_GRPC_PORT_8001_TCP_ADDR": "10.0.0.8",
            "TIERSTORE_A_PORT": "tcp://10.0.0.8:8001",
        },
    ],
)
def test_kubernetes_service_links_set_nothing(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert (settings.port, settings.grpc_port) == (8000, None)
    monkeypatch.setenv("TIERSTORE_THREADS", "3")
    assert load_settings().threads == 3, "all else still counts"
    monkeypatch.setenv("TIERSTORE_PORT", "9000")
    assert load_settings().port == 9000
    monkeypatch.setenv("TIERSTORE_SERVICE", "10.0.0.7")
    with pytest.raises(ConfigError, match="TIERSTORE_SERVICE "):
        load_settings(strict_environment=True)


@pytest.mark.parametrize("given", ["4 gigs", "4GiBB", "much", ""])
def test_a_size_that_is_none_says_what_one_looks_like(given: str) -> None:
    with pytest.raises(ConfigError, match=f"host_budget: expected a size such as 512MiB, 4GiB, .*, got '{given}'"):
        load_settings(host_budget=given)


SIZES = [name for name, field in Settings.model_fields.items() if isinstance(field.default, ByteSize)]
SIZES += ["host_budget", "overlay_budget", "load_memory"]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_without_its_unit_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"{name}: expected a size with a unit, such as 4GiB, got 4"
    for given in (4, "4", 4.0):
        with pytest.raises(ConfigError, match=says):
            load_settings(**{name: given})
    (tmp_path / "tierstore.toml").write_text(f"{name} = 4\n")
    with pytest.raises(ConfigError, match=says):
        load_settings(tmp_path / "tierstore.toml")
    monkeypatch.setenv(f"TIERSTORE_{name.upper()}", "4")
    with pytest.raises(ConfigError, match=says):
        load_settings()
    if name != "ssd_cache":  # 1MiB at least
        assert getattr(load_settings(**{name: "4B"}), name) == 4, "a size that small is said with its unit"


def test_sizes_of_quotas_take_units_and_zero_stays_what_it_means() -> None:
    with pytest.raises(ConfigError, match=r"quotas\.ctr\.log_bytes: expected a size with a unit"):
        load_settings(quotas={"ctr": {"log_bytes": 10}})
    settings = load_settings(device_budget=0, disk_reserve="0", quotas={"ctr": {"log_bytes": "10GiB"}})
    assert (settings.device_budget, settings.disk_reserve) == (0, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ssd_cache": "1GiB"}, "expected remote or upstream beside it, got neither"),
        ({"ssd_cache": "64KiB", "remote": "redis://h"}, "expected 0 or at least 1MiB, got 65536 bytes"),
        ({"ssd_cache": "5TiB", "remote": "redis://h"}, "ssd_cache"),
    ],
)
def test_a_cache_on_ssd_is_for_rows_of_other_machines_and_of_a_size(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(**given)
    assert load_settings(ssd_cache="200GiB", upstream="http://a:8000").ssd_cache == 200 << 30


@pytest.mark.parametrize("other", ["remote", "upstream"])
def test_rows_of_other_machines_are_in_no_partition_of_this_one(other: str) -> None:
    with pytest.raises(ConfigError, match="partition"):
        load_settings(partition="0-15/64", **{other: "redis://h" if other == "remote" else "http://a:1"})


def test_the_page_of_settings_is_up_to_date_and_tells_every_default() -> None:
    from tools.make_settings_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/make_settings_page.py"
    for name, default, text in described_settings():
        assert default, name
        assert text, name
        assert not {"factory", "undefined"} & set(re.findall("factory|undefined", default.lower())), name
    known = {name: default for name, default, _ in described_settings()}
    assert (known["port"], known["max_delta"], known["watch"], known["access_log"]) == (
        "8000",
        "256MiB",
        "none",
        "false",
    )


def test_an_address_to_listen_on_may_be_in_brackets_and_has_no_port() -> None:
    assert load_settings(host="[::1]").host == "::1"
    for wrong, why in [
        ("127.0.0.1:9000", "port"),
        ("[::1]:9000", "port"),
        ("http://127.0.0.1", "port"),
        ("", "got ''"),
    ]:
        with pytest.raises(ConfigError, match=f"host.*expected an address.*{why}"):
            load_settings(host=wrong)


@pytest.mark.parametrize("data", ["s3://bucket/data", "file:///data", "a\0b"])
def test_a_data_directory_is_on_this_machine(data: str) -> None:
    with pytest.raises(ConfigError, match="data: expected a directory of this machine, got"):
        load_settings(data=data)
