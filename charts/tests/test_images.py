"""images/Dockerfile as it is written. What can be built here is built and run by `e2e/cluster`; `worker-cuda` is not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("control", "worker", "worker-cuda")
LABELS = {f"org.opencontainers.image.{name}" for name in ("title", "description", "licenses", "version")}


class Stage(NamedTuple):
    base: str
    name: str
    steps: list[tuple[str, str]]  # instruction, the rest of its line

    def all(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.steps if word == instruction]


def instructions() -> Iterator[tuple[str, str]]:
    lines = [line for line in (ROOT / "images/Dockerfile").read_text().splitlines() if line.strip() and line[0] != "#"]
    for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        yield word, rest


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base, name, [])
        elif found:
            list(found.values())[-1].steps.append((word, rest))
    return found


def inherited(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage behind those that it begins with."""
    stage = stages[name]
    return [*(inherited(stages, stage.base) if stage.base in stages else []), stage]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_without_root_writes_to_tmp_only_and_says_what_it_is(stages: dict[str, Stage], target: str) -> None:
    own = inherited(stages, target)
    assert own[-1].base in (*stages, "${BASE}", "${CUDA_BASE}")
    assert [user for stage in own for user in stage.all("USER")] == ["10001:10001"], "a number: the kubelet checks it"
    assert [one for stage in own for one in stage.all("ENTRYPOINT")] == ["[]"]
    assert any("HOME=/tmp" in one for stage in own for one in stage.all("ENV"))
    assert set(re.findall(r"([\w.]+)=\"", " ".join(one for stage in own for one in stage.all("LABEL")))) == LABELS
    assert not any(stage.all("RUN") for stage in own), "whatever builds it stays in other stages"
    assert own[-1].all("CMD")


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_copied_comes_from_stages_before_which_leave_no_installer(stages: dict[str, Stage], target: str) -> None:
    names = list(stages)
    sources = [re.findall(r"--from=(\S+)", copy)[0] for copy in stages[target].all("COPY")]
    assert sources
    assert all(names.index(source) < names.index(target) for source in sources)
    clean = [source for source in sources if any("rm -rf" in run and "/pip*" in run for run in stages[source].all("RUN"))]
    assert clean == [source for source in sources if source != "program"]


def test_every_stage_serves_an_image(stages: dict[str, Stage]) -> None:
    copied = {
        source for stage in stages.values() for copy in stage.all("COPY") for source in re.findall(r"--from=(\S+)", copy)
    }
    assert copied | {stage.base for stage in stages.values()} | set(TARGETS) >= set(stages)


def test_cuda_is_vllms_own_image_of_the_version_that_we_name(stages: dict[str, Stage]) -> None:
    """And nothing else needs that image: a builder may run all stages before the one that it is asked for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [one.removeprefix("vllm==") for one in extras["cuda"] if one.startswith("vllm==")]
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and rest.startswith("CUDA_BASE="))
    assert defaults == {"CUDA_BASE": f"docker.io/vllm/vllm-openai:v{pin}"}
    on_cuda = [name for name, stage in stages.items() if stage.base == "${CUDA_BASE}"]
    assert on_cuda == list(stages)[-len(on_cuda) :]
    (install,) = [run for run in stages["worker-cuda-dependencies"].all("RUN") if "pip install" in run]
    assert "--system-site-packages" in install
    assert "[agent]" in install, "the extra without vLLM"
