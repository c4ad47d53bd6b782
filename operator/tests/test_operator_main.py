"""The program as a person meets it, before it has a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool.errors import SettingsError
from prefixpool_operator.main import checked, main
from prefixpool_operator.settings import OperatorSettings

IMAGES = ("--worker-image", "w", "--router-image", "r")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "kubectl describe inferencepools.prefixpool.dev" in shown
    assert "PREFIXPOOL_OPERATOR_WORKER_IMAGE" in shown


def test_without_images_it_says_which_setting_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--worker-image is required" in capsys.readouterr().err


def test_without_a_cluster_it_says_where_it_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main([*IMAGES, "--port", "0"]) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--namespaces", "Team A"), ("--namespaces", "a,b_c"), ("--namespace", "a.b"), ("--lease-name", "Lease")],
)
def test_a_name_that_no_namespace_can_have_is_refused(flag: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IMAGES, flag, name]) == 2
    assert f"{flag} {name.rpartition(',')[2]!r}: expected lower-case letters" in capsys.readouterr().err


@pytest.mark.parametrize(("retry_s", "renew_s", "duration_s"), [(2, 10, 10), (10, 10, 15), (2, 20, 15)])
def test_lease_terms_that_let_two_lead_are_refused(retry_s: float, renew_s: float, duration_s: float) -> None:
    settings = OperatorSettings(
        worker_image="w",
        router_image="r",
        lease_retry_s=retry_s,
        lease_renew_s=renew_s,
        lease_duration_s=duration_s,
    )
    with pytest.raises(SettingsError, match="must be less than"):
        checked(settings)
