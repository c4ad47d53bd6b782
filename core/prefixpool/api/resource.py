"""Names of the kind. Always the full name: the Gateway API has an `InferencePool` of its own, in another group."""

from typing import Final

GROUP: Final = "prefixpool.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferencePool"
PLURAL: Final = "inferencepools"
SINGULAR: Final = "inferencepool"
SHORT_NAME: Final = "ppool"
CATEGORY: Final = "prefixpool"
FULL_NAME: Final = f"{PLURAL}.{GROUP}"

# Pods are `<pool>-<ordinal>`, children `<pool>-replicas` and the like; pod names and label values end at 63 characters.
NAME_MOST: Final = 40
NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"  # a Service bears it, hence no digit in front and no dots
