"""What a loading engine is doing, from lines of vLLM 0.32's log."""

from __future__ import annotations

from prefixpool_agent.engines.progress import STARTING, progress, progress_of_line

LOG = """\
(APIServer pid=1) INFO 11-29 20:36:53 [api_utils.py:286] non-default args: {'host': '127.0.0.1'}
(EngineCore pid=2) INFO 11-29 20:37:11 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=3) INFO 11-29 20:37:30 [cpu_model_runner.py:68] Starting to load model m...
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  1.02it/s]
(Worker pid=3) INFO 11-29 20:37:32 [default_loader.py:501] Loading weights took 0.98 seconds
(EngineCore pid=2) INFO 11-29 20:37:33 [kv_cache_utils.py:2327] CPU KV cache size: 10,272 tokens
(EngineCore pid=2) INFO 11-29 20:37:33 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.49 s
(APIServer pid=1) INFO 11-29 20:37:36 [entry.py:140] Starting vLLM server on http://127.0.0.1:18310
INFO:     Waiting for application startup.
INFO:     Application startup complete.
"""


def test_a_start_goes_forward_to_ready() -> None:
    stages = [found for line in LOG.splitlines() if (found := progress_of_line(line))]
    fractions = [stage.fraction for stage in stages]
    assert fractions == sorted(fractions)
    assert stages[-1].ready
    assert not stages[-2].ready
    assert [stage.text for stage in stages[:3]] == [
        "reading the model's configuration",
        "starting the engine",
        "loading weights",
    ]


def test_shards_are_counted() -> None:
    found = progress_of_line("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]")
    assert found is not None
    assert found.text == "loading weights 50 %"


def test_progress_never_falls_and_other_lines_say_nothing() -> None:
    far = progress(LOG.splitlines()[:6])
    assert progress(["some warning", LOG.splitlines()[0]], far) == far
    assert progress([]) == STARTING


def test_compilation_that_is_turned_off_is_not_mistaken_for_one() -> None:
    assert progress_of_line("WARNING [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs") is None
    found = progress_of_line("INFO [monitor.py:40] Starting torch.compile")
    assert found is not None
    assert found.text == "compiling"
