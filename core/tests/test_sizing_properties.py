"""What holds for every model, device and budget."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from prefixpool.sizing import catalogue, kv, parallel, shape
from prefixpool.sizing.errors import ShapeError, SizingError
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.memory import Batching
from prefixpool.sizing.parallel import Parallel
from prefixpool.sizing.plan import Budget, SizingPlan, SizingRequest, plan
from prefixpool.sizing.shape import LayerKind, ModelShape

GIB = 1 << 30
MODELS = [catalogue.model(name) for name in catalogue.CONFIGS]
DEVICES = list(catalogue.ACCELERATORS.values())

models = st.sampled_from(MODELS)
ranks = st.sampled_from([1, 2, 4, 8])


@st.composite
def requests(draw: st.DrawFn) -> SizingRequest:
    shape = draw(models)
    split = Parallel(tensor=draw(ranks), pipeline=draw(st.sampled_from([1, 2])))
    length = draw(st.integers(256, shape.max_model_len))
    try:
        parallel.check(shape, split)
    except SizingError:
        split = Parallel()
    return SizingRequest(
        shape=shape,
        accelerator=draw(st.sampled_from(DEVICES)),
        parallel=split,
        kv_dtype=draw(st.sampled_from(KvDtype)),
        utilisation_percent=draw(st.integers(50, 100)),
        max_model_len=length,
        block_tokens=draw(st.sampled_from([16, 32, 64])),
        batching=Batching(tokens=2048, sequences=256),
        budget=Budget(sessions=draw(st.integers(1, 5000)), tokens_per_session=draw(st.integers(1, length))),
    )


def used(found: SizingPlan, request: SizingRequest) -> int:
    return found.memory.weights + found.memory.overhead + found.device_per_replica.bytes // request.parallel.devices


@settings(max_examples=150, deadline=None)
@given(requests())
def test_a_plan_that_fits_never_exceeds_what_may_be_used(request: SizingRequest) -> None:
    found = plan(request)
    if found.fits:
        assert used(found, request) <= found.memory.usable <= found.memory.total
        assert found.replicas >= 1
        assert found.concurrent_sequences >= 1
        assert found.sessions_per_replica * found.replicas >= (request.budget.sessions if request.budget else 0)
    else:
        assert found.short_bytes > 0
        assert found.replicas == 0


@settings(max_examples=60, deadline=None)
@given(requests())
def test_so_many_bytes_more_as_are_missing_make_it_fit_and_one_less_does_not(request: SizingRequest) -> None:
    whole = replace(request, utilisation_percent=100)
    found = plan(whole)
    if not found.fits:
        grown = replace(whole.accelerator, memory=whole.accelerator.memory + found.short_bytes)
        assert plan(replace(whole, accelerator=grown)).fits
        less = replace(grown, memory=grown.memory - 1)
        assert plan(replace(whole, accelerator=less)).short_bytes == 1


@settings(max_examples=100, deadline=None)
@given(requests(), st.integers(0, 100 * GIB))
def test_more_memory_never_holds_less_and_never_needs_more_replicas(request: SizingRequest, more: int) -> None:
    found = plan(request)
    larger = plan(replace(request, accelerator=replace(request.accelerator, memory=request.accelerator.memory + more)))
    assert larger.device_per_replica.tokens >= found.device_per_replica.tokens
    assert larger.fits >= found.fits
    if found.fits:
        assert larger.replicas <= found.replicas


@settings(max_examples=100, deadline=None)
@given(requests(), st.integers(0, 5000))
def test_a_larger_budget_never_needs_fewer_replicas(request: SizingRequest, more: int) -> None:
    assert request.budget is not None
    larger = replace(request.budget, sessions=request.budget.sessions + more)
    assert plan(replace(request, budget=larger)).replicas >= plan(request).replicas


@settings(max_examples=100, deadline=None)
@given(requests())
def test_kv_in_fp8_never_holds_less(request: SizingRequest) -> None:
    wide, narrow = (plan(replace(request, kv_dtype=dtype)) for dtype in (KvDtype.BF16, KvDtype.FP8))
    assert narrow.device_per_replica.tokens >= wide.device_per_replica.tokens
    assert narrow.fits >= wide.fits


@given(models, ranks)
def test_tensor_parallelism_neither_loses_nor_invents_kv(shape: ModelShape, tensor: int) -> None:
    """All ranks together hold each head once, or in so many copies as is said."""
    split = Parallel(tensor=tensor)
    for layers in shape.kv:
        if layers.kind is LayerKind.STATE:
            assert 0 <= parallel.rank_layers(layers, split).state_bytes * tensor - layers.state_bytes < tensor
        elif layers.kind is LayerKind.LATENT or layers.heads % tensor == 0 or tensor % layers.heads == 0:
            rank = parallel.rank_layers(layers, split)
            assert rank.heads * tensor == layers.heads * parallel.copies(layers, split)
            assert rank.values == layers.values


@given(models, ranks)
def test_tensor_parallelism_neither_loses_nor_invents_weights(shape: ModelShape, tensor: int) -> None:
    """Beside what is whole on every rank, the ranks' shares add up, rounded up to whole bytes."""
    share = parallel.rank_weight_bytes(shape, Parallel(tensor=tensor)) - shape.replicated_bytes
    whole = shape.weight_bytes - shape.replicated_bytes
    assert whole <= share * tensor < whole + tensor


@given(models, ranks)
def test_bytes_per_token_is_what_blocks_of_all_ranks_take(shape: ModelShape, tensor: int) -> None:
    """For models of one kind: no padding, so that blocks and tokens agree to the byte."""
    try:
        parallel.check(shape, Parallel(tensor=tensor))
    except SizingError:
        return
    if len(shape.kv) == 1:
        split = Parallel(tensor=tensor)
        laid = kv.layout(shape, KvDtype.AUTO, 16, split)
        assert laid.block_bytes * tensor == 16 * kv.bytes_per_token(shape, KvDtype.AUTO, split)


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.just("many"), st.floats(-1, 1), st.just(1 << 31))
NAMES = st.sampled_from(["quant_method", "bits", "w_bit", "config_groups", "weights", "num_bits", "factor", "hidden_size"])
WORDS = st.sampled_from(["awq", "compressed-tensors", "full_attention", "linear"])
ODD = st.recursive(PLAIN | WORDS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3))
FIELDS = sorted(
    {field for config in catalogue.CONFIGS.values() for field in config} | {"text_config", "quantization_config"}
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(catalogue.CONFIGS)), st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3))
@example("smollm2-135m", {"head_dim": None, "hidden_size": 1})  # heads of no width divided by zero
def test_any_config_gives_a_shape_or_an_error_that_is_ours(name: str, odd: dict[str, object]) -> None:
    try:
        found = shape.parse({**catalogue.CONFIGS[name], **odd})
    except ShapeError:
        return
    assert found.weight_bytes > 0
    assert kv.layout(found).block_bytes > 0
