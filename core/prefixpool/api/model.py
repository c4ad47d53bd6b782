"""`spec.model`: what is served, and from where."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta

from prefixpool.api.quantity import Bytes
from prefixpool.api.struct import ATOMIC, BY_NAME, ApiStruct, ObjectName, Path, Rule, Small, Text, Tokens, at_most_one
from prefixpool.sizing.shape import LayerKind

MODELS: Final = "/models"  # where the volume is mounted

_Width = Annotated[int, Meta(ge=1, le=1_000_000)]
_Vocabulary = Annotated[int, Meta(ge=1, le=10_000_000)]


class Volume(ApiStruct, frozen=True, kw_only=True):
    """Where a model's files lie in the cluster."""

    claim_name: Annotated[
        ObjectName, Meta(description=f"PersistentVolumeClaim with the model's files, mounted read-only at {MODELS}.")
    ]


class Cache(ApiStruct, frozen=True, kw_only=True):
    """Where downloads from the Hub are kept."""

    claim_name: Annotated[
        ObjectName,
        Meta(
            description="PersistentVolumeClaim that all replicas write to: access mode ReadWriteMany, unless one node runs "
            "them all. For folders of the nodes themselves, a PersistentVolume of type hostPath, which pod security allows."
        ),
    ]


class Adapter(ApiStruct, frozen=True, kw_only=True):
    """A LoRA adapter that is served beside the model."""

    name: Annotated[Text, Meta(description="Name that clients use as the model.")]
    source: Annotated[Path, Meta(description="Hub repository, or absolute path in the volume or the image.")]


class KvFigures(ApiStruct, frozen=True, kw_only=True):
    """Layers that keep the same kind of KV."""

    rules: ClassVar = (
        Rule(
            "self.kind == 'state' ? has(self.stateBytes) && !has(self.valuesPerToken) "
            ": has(self.valuesPerToken) && !has(self.stateBytes)",
            "layers of kind state need stateBytes, all others valuesPerToken",
            lambda kv: (kv.kind is LayerKind.STATE) == (kv.state_bytes is not None) == (kv.values_per_token is None),
        ),
        Rule(
            "(self.kind == 'window' || self.kind == 'chunk') == has(self.window)",
            "layers of kind window or chunk need window (in tokens), others take none",
            lambda kv: (kv.kind in (LayerKind.WINDOW, LayerKind.CHUNK)) == (kv.window is not None),
        ),
    )

    kind: Annotated[
        LayerKind,
        Meta(description="full: all tokens; window: the last ones; chunk: the current chunk; latent: MLA; state: constant."),
    ]
    layers: Annotated[Small, Meta(description="Number of such layers.")]
    heads: Annotated[Small, Meta(description="KV heads of a layer (1 for latent and state).")] = 1
    values_per_token: Annotated[
        _Width | None,
        Meta(description="Numbers that a head keeps for a token: 2 × head size; MLA: latent rank + rope size."),
    ] = None
    window: Annotated[Tokens | None, Meta(description="Tokens of the window or chunk.")] = None
    state_bytes: Annotated[Bytes | None, Meta(description="State of one layer and sequence.")] = None


class ShapeFigures(ApiStruct, frozen=True, kw_only=True):
    """The model's figures by hand, where neither the catalogue nor its files can be read."""

    weights: Annotated[Bytes, Meta(description="All weights as stored, such as 15Gi.")]
    max_model_len: Annotated[Tokens, Meta(description="Longest sequence that the model takes.")]
    hidden_size: Annotated[_Width, Meta(description="Width of the model.")]
    intermediate_size: Annotated[_Width, Meta(description="Width that one token passes in a feed-forward layer.")]
    attention_heads: Annotated[Small, Meta(description="Query heads of a layer.")]
    vocabulary_size: Annotated[_Vocabulary, Meta(description="Number of tokens in the vocabulary.")]
    kv: Annotated[
        tuple[KvFigures, ...],
        Meta(description="What layers keep, one entry for each kind.", min_length=1, max_length=8, extra_json_schema=ATOMIC),
    ]


class Model(ApiStruct, frozen=True, kw_only=True):
    """What is served, and from where."""

    rules: ClassVar = (
        Rule(
            "!self.trustRemoteCode || has(self.revision)",
            "code from the Hub runs only at a fixed revision: set model.revision to a commit, or trustRemoteCode to false",
            lambda model: not model.trust_remote_code or model.revision is not None,
            ".trustRemoteCode",
        ),
        Rule(
            f"!has(self.volume) || self.source == '{MODELS}' || self.source.startsWith('{MODELS}/')",
            f"with a volume, model.source is a path in it, such as {MODELS}/llama-3.1-8b: change it, or remove model.volume",
            lambda model: model.volume is None or model.source == MODELS or model.source.startswith(f"{MODELS}/"),
            ".source",
        ),
        Rule(
            "!(has(self.volume) && has(self.tokenSecret))",
            "a volume needs no token for the Hub: remove model.tokenSecret or model.volume",
            lambda model: at_most_one(model.volume, model.token_secret),
            ".tokenSecret",
        ),
        Rule(
            "!(has(self.cache) && self.source.startsWith('/'))",
            "a cache keeps what comes from the Hub: remove model.cache, or name a repository in model.source",
            lambda model: model.cache is None or not model.source.startswith("/"),
            ".cache",
        ),
        Rule(
            "!(has(self.revision) && self.source.startsWith('/'))",
            "a revision is one of a Hub repository: remove model.revision, or name a repository in model.source",
            lambda model: model.revision is None or not model.source.startswith("/"),
            ".revision",
        ),
    )
    immutable: ClassVar = {"source": "another model is another pool: create a new InferencePool and delete this one"}

    source: Annotated[
        Path,
        Meta(description=f"Hub repository as `organisation/name`, or an absolute path in the volume ({MODELS}/…) or image."),
    ]
    revision: Annotated[
        Text | None, Meta(description="Branch, tag or commit of the Hub repository; a commit never moves.")
    ] = None
    served_name: Annotated[
        Text | None, Meta(description="Name that clients use as `model`; by default the last part of source.")
    ] = None
    volume: Annotated[Volume | None, Meta(description="Where the files lie, if not on the Hub or in the image.")] = None
    cache: Annotated[
        Cache | None,
        Meta(
            description="Where downloads from the Hub are kept, for all replicas and for their next starts. Without one, "
            "each pod downloads for itself."
        ),
    ] = None
    token_secret: Annotated[
        ObjectName | None, Meta(description="Secret whose key `token` is an access token for the Hub.")
    ] = None
    trust_remote_code: Annotated[bool, Meta(description="Run Python code of the model's repository in the engine.")] = False
    adapters: Annotated[
        tuple[Adapter, ...],
        Meta(description="LoRA adapters that are served beside the model.", max_length=64, extra_json_schema=BY_NAME),
    ] = ()
    shape: Annotated[
        ShapeFigures | None,
        Meta(
            description="Figures by hand; else they come from the catalogue, or from config.json and the weights' headers."
        ),
    ] = None

    @property
    def name(self) -> str:
        """What clients write as `model`."""
        return self.served_name or self.source.rstrip("/").rsplit("/", 1)[-1]
