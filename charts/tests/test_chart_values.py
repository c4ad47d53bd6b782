"""values.yaml, its schema, and the pages that speak of it say the same."""

import json
import re
from collections.abc import Iterator
from typing import Any

import make_chart
import pytest
import yaml
from helm_python import HelmValuesError

from prefixpool import kubernetes_names
from prefixpool_testing import chart

Raw = dict[str, Any]
Path = tuple[str, ...]

TEXT = (chart.FOLDER / "values.yaml").read_text()
VALUES: Raw = yaml.safe_load(TEXT)
ROWS: dict[Path, Any] = {row.path: row.default for row in make_chart.described(TEXT)}


def groups(values: Raw = VALUES, path: Path = ()) -> Iterator[Path]:
    """Maps with keys that the chart knows; what a row describes as a whole belongs to Kubernetes or to the user."""
    yield path
    for key, value in values.items():
        if isinstance(value, dict) and (*path, key) not in ROWS:
            yield from groups(value, (*path, key))


def nested(path: Path, value: Any) -> Any:
    return {path[0]: nested(path[1:], value)} if path else value


@pytest.mark.parametrize("path", [path for path in groups() if path != ("global",)], ids=".".join)
def test_a_value_with_a_typo_is_refused(path: Path) -> None:
    with pytest.raises(HelmValuesError, match="typo"):
        chart.files(nested((*path, "typo"), 1))


def test_other_charts_may_have_global_values() -> None:
    assert chart.objects({"global": {"storageClass": "fast"}}) == chart.objects()


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": "2"},
        {"image": {"digest": "sha256:abc"}},
        {"image": {"tag": "1 2"}},
        {"image": {"repository": "a b/c"}},
        {"image": {"repository": "mirror/"}},
        {"image": {"repository": "Upper/Case"}},
        {"worker": {"image": {"repository": "mine/worker:1.2"}}},
        {"global": {"imageRegistry": "a b"}},
        {"global": {"imageRegistry": "mirror.example/"}},
        {"global": {"imageRegistry": "https://mirror.example"}},
        {"global": {"imagePullSecrets": [{"name": "Mirror"}]}},
        {"global": {"commonLabels": {"team": "a b"}}},
        {"global": {"commonLabels": {"a/b/c": "x"}}},
        {"serviceAccount": {"name": "an account"}},
        {"priorityClassName": "High"},
        {"nodeSelector": {"pool": "gpu,cpu"}},
        {"podAnnotations": {"a b": "c"}},
        {"pools": {"p": {"spec": {}, "namespace": "Team A"}}},
        {"image": {"pullPolicy": "always"}},
        {"router": {"image": {"tag": "1.2"}}},
        {"router": {"image": {"repository": "mine/router", "pullPolicy": "Always"}}},
        {"global": {"imagePullSecrets": ["mirror"]}},
        {"watch": {"namespaces": "team-a"}},
        {"watch": {"namespaces": ["Team_A"]}},
        {"pools": {"Upper": {"spec": {}}}},
        {"pools": {"bare": {}}},
        {"pools": {"p": {"spec": {}, "replicas": 2}}},
        {"podAnnotations": {"a": 1}},
        {"monitoring": {"podMonitor": {"interval": "soon"}}},
        {"podDisruptionBudget": {"maxUnavailable": 0}},
        {"podDisruptionBudget": {"maxUnavailable": "0%"}},
        {"podDisruptionBudget": {"maxUnavailable": "101%"}},
        {"fullnameOverride": "7up"},
        {"crds": {"keep": None}},
        {"log": {"level": None}},
        {"worker": {"image": {"repository": None}}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(values: Raw) -> None:
    with pytest.raises(HelmValuesError):
        chart.files(values)


@pytest.mark.parametrize(
    "values",
    [
        {"global": {"imageRegistry": "mirror.example:5000/proxy/docker.io"}},
        {"global": {"imageRegistry": "[fd00::1]:5000"}},
        {"global": {"imageRegistry": "localhost"}},
        {"global": {"imagePullSecrets": [{"name": "mirror.v2"}]}},
        {"global": {"commonLabels": {"example.com/team": "Search_1.x", "empty": ""}}},
        {"image": {"repository": "ghcr.io/org.name/control"}},
        {"image": {"repository": "mirror.example:5000/a__b/c-d.e", "tag": "v1.0_rc.1-x"}},
        {"image": {"tag": "", "digest": "sha256:" + "0" * 64}},
        {"serviceAccount": {"name": "team.account"}},
        {"podAnnotations": {"prometheus.io/scrape": "any text, of any kind"}},
        {"nodeSelector": {"kubernetes.io/arch": "amd64"}},
        {"podDisruptionBudget": {"maxUnavailable": "100%"}},
    ],
    ids=str,
)
def test_whatever_kubernetes_takes_is_taken(values: Raw) -> None:
    assert chart.objects(values)


@pytest.mark.parametrize("path", [path for path in (*groups(), *ROWS) if path], ids=".".join)
def test_a_value_that_is_taken_away_is_done_without_or_asked_for_by_name(path: Path) -> None:
    """`watch:` with nothing below it is null, which takes the default away."""
    found = rendered_or_asked(nested(path, None))
    if isinstance(found, str):
        assert f"missing property '{path[-1]}'" in found
    else:
        (flags,) = (
            each["spec"]["template"]["spec"]["containers"][0]["args"] for each in found if each["kind"] == "Deployment"
        )
        assert not [flag for flag in flags if flag.endswith("=")]


def rendered_or_asked(values: Raw) -> list[Raw] | str:
    """Objects, or what the schema says."""
    try:
        return chart.objects(values)
    except HelmValuesError as error:
        return str(error)


def test_names_are_those_that_the_programs_take() -> None:
    schema = json.loads((chart.FOLDER / "values.schema.json").read_text())["definitions"]
    assert schema["name"]["pattern"] == f"^({kubernetes_names.LABEL})?$"
    assert schema["subdomain"]["pattern"] == f"^({kubernetes_names.SUBDOMAIN})?$"
    assert (schema["name"]["maxLength"], schema["subdomain"]["maxLength"]) == (63, 253)


def test_every_value_is_described() -> None:
    leaves = {
        (*path, key) for path in groups() for key, value in at(path).items() if not isinstance(value, dict) or not value
    }
    assert leaves <= ROWS.keys()
    assert all(at(path) == default for path, default in ROWS.items())


def at(path: Path) -> Any:
    found: Any = VALUES
    for key in path:
        found = found[key]
    return found


def test_the_readme_has_the_table_of_todays_values() -> None:
    page = (chart.FOLDER / "README.md").read_text()
    assert make_chart.readme(page, TEXT) == page, "run `make crds`"
    assert f"| `{'.'.join(next(iter(ROWS)))}` |" in page


PAGES = ("charts/prefixpool/README.md", "charts/prefixpool/templates/NOTES.txt", "docs/install.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_speaks_of_values_and_files_that_exist(page: str, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / page).read_text()
    for name in re.findall(r"--set(?:-string)? ([\w.]+)", text):
        assert at(tuple(name.split("."))) is not None, name
    named = re.findall(r"(?<![\w/.:])(?:charts/prefixpool|crds|docs|examples)/[\w./-]*\w", text)
    linked = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert named or linked
    for file in named:
        assert (pytestconfig.rootpath / file).exists(), file
    for file in linked:
        assert (pytestconfig.rootpath / page).parent.joinpath(file).exists(), file


def commands() -> list[str]:
    """Of Helm, in docs/install.md, each on one line."""
    text = (chart.FOLDER.parents[1] / "docs/install.md").read_text().replace("\\\n", " ")
    return re.findall(r"^    (helm .*)$", text, re.MULTILINE)


def test_no_command_of_the_guide_brings_pools_before_their_kind_is_there() -> None:
    """Helm refuses the whole release."""
    installs = [command for command in commands() if command.startswith("helm install")]
    assert len(installs) > 1
    for command in installs:
        for name in re.findall(r"ci/(\w+)-values", command):
            assert not chart.CI[name].get("pools"), command


def test_no_upgrade_of_the_guide_forgets_the_registry_that_was_given_at_first() -> None:
    upgrades = [command for command in commands() if command.startswith("helm upgrade")]
    assert len(upgrades) > 1
    assert all("--reset-then-reuse-values" in command for command in upgrades)


@pytest.mark.parametrize("page", ["docs/install.md", "images/Dockerfile"])
def test_images_are_pushed_under_the_tag_that_the_chart_asks_for(page: str) -> None:
    version = yaml.safe_load((chart.FOLDER / "Chart.yaml").read_text())["appVersion"]
    tags = re.findall(r"prefixpool/(?:control|worker):(\S+?)[`,\s]", (chart.FOLDER.parents[1] / page).read_text())
    assert len(tags) > 1
    assert all(tag in (version, f"{version}-cuda") for tag in tags)


def test_a_pool_that_nobody_looks_after_is_said_so() -> None:
    def notes(*namespaces: str) -> str:
        pools = {"here": {"namespace": "team-a", "spec": {}}, "lost": {"spec": {}}}
        return chart.files({"watch": {"namespaces": list(namespaces)}, "pools": pools})["prefixpool/templates/NOTES.txt"]

    said = f"does not look after pool {chart.NAMESPACE}/lost"
    assert said in notes("team-a")
    assert "team-a/here" not in notes("team-a")
    assert said not in notes()


def test_whoever_asks_for_monitors_is_told_of_the_label_without_which_nothing_is_scraped() -> None:
    def notes(values: Raw) -> str:
        return chart.files(values)["prefixpool/templates/NOTES.txt"]

    for monitor in ("serviceMonitor", "podMonitor"):
        assert "prefixpool.dev/scrape=true" in notes({"monitoring": {monitor: {"enabled": True}}})
    assert "scrape" not in notes({})
