"""What tensor and pipeline parallelism leave on one device.

KV heads are split over tensor-parallel ranks; with more ranks than heads they are copied (vLLM:
`max(1, kv_heads // ranks)`). MLA's one latent vector is whole on every rank. Of the weights, norms, routers and MLA's
down-projections are whole on every rank. Pipeline stages hold whole layers; the fullest stage decides.
"""

from __future__ import annotations

import msgspec

from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.shape import KvLayers, LayerKind, ModelShape


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one replica: `tensor` × `pipeline`."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline


def check(shape: ModelShape, parallel: Parallel) -> None:
    """SizingError if the engine would refuse this split."""
    if parallel.tensor < 1 or parallel.pipeline < 1:
        raise SizingError("tensor and pipeline parallelism are at least 1")
    if shape.heads % parallel.tensor:
        fits = [ranks for ranks in range(1, min(shape.heads, 16) + 1) if shape.heads % ranks == 0]
        raise SizingError(
            f"{shape.heads} attention heads of {shape.name} cannot be split over {parallel.tensor} devices; "
            f"tensor parallelism may be {', '.join(map(str, fits))}"
        )
    for layers in shape.kv:
        if layers.kind not in (LayerKind.LATENT, LayerKind.STATE) and not _divides(layers.heads, parallel.tensor):
            raise SizingError(
                f"{layers.heads} KV heads of {shape.name} can be neither split over nor copied to {parallel.tensor} "
                "devices: one number must be a multiple of the other"
            )
    if parallel.pipeline > shape.layers:
        raise SizingError(f"{shape.name} has {shape.layers} layers, too few for {parallel.pipeline} pipeline stages")


def _divides(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


def rank_layers(layers: KvLayers, parallel: Parallel) -> KvLayers:
    """The same layers as one tensor-parallel rank keeps them."""
    if layers.kind is LayerKind.LATENT:
        return layers
    if layers.kind is LayerKind.STATE:
        return msgspec.structs.replace(layers, state_bytes=-(-layers.state_bytes // parallel.tensor))
    return msgspec.structs.replace(layers, heads=max(1, layers.heads // parallel.tensor))


def copies(layers: KvLayers, parallel: Parallel) -> int:
    """How many ranks hold the same KV."""
    if layers.kind is LayerKind.LATENT:
        return parallel.tensor
    return 1 if layers.kind is LayerKind.STATE else max(1, parallel.tensor // layers.heads)


def stored_copies(shape: ModelShape, parallel: Parallel) -> int:
    """Ranks whose blocks lie in host memory and on disk: one, where all tensor-parallel ranks hold the same."""
    same = all(layers.kind is LayerKind.LATENT for layers in shape.kv)
    return 1 if same and parallel.pipeline == 1 else parallel.devices


def rank_weight_bytes(shape: ModelShape, parallel: Parallel) -> int:
    """Bytes of weights on the device that holds most, as the engine keeps them."""
    return -(-_rank_stored_bytes(shape, parallel) // shape.loaded_parts)


def _rank_stored_bytes(shape: ModelShape, parallel: Parallel) -> int:
    same = shape.replicated_bytes
    split = shape.weight_bytes - same
    if parallel.pipeline == 1:
        return same + -(-split // parallel.tensor)
    embedding = min(split, int(shape.parameters.embedding * shape.bits.base / 8))
    body = split - embedding * shape.parameters.embeddings
    most = stage_layers(shape.layers, parallel)
    return -(-same * most // shape.layers) + -(-(body * most // shape.layers + embedding) // parallel.tensor)


def stage_layers(layers: int, parallel: Parallel) -> int:
    """Layers of the fullest pipeline stage."""
    return -(-layers // parallel.pipeline)
