"""Where tests do not begin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import conftest


def test_a_disk_that_is_nearly_full_is_said_once_before_any_test(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def nearly_full(path: object) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=1 << 30)

    monkeypatch.setattr(conftest.shutil, "disk_usage", nearly_full)
    config = SimpleNamespace(option=SimpleNamespace(collectonly=False), args=["tests"])
    with pytest.raises(pytest.exit.Exception, match=r"has 1,024 MiB free, and tests take 5,120: .*TMPDIR"):
        conftest.pytest_configure(config)  # type: ignore[arg-type]
    only_collected = SimpleNamespace(option=SimpleNamespace(collectonly=True), args=["tests"])
    conftest.pytest_configure(only_collected)  # type: ignore[arg-type]
    assert len(asked) == 1
