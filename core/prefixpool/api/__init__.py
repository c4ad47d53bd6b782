"""InferencePool (`prefixpool.dev/v1alpha1`): its types, once, for reading objects, for the CRD and for the reference page.

resource    names of the kind, as the API server knows it
quantity    Kubernetes quantities as bytes
struct      what all types share: rules in CEL and in Python, side by side
model, engine, placement, kv_cache, router    parts of the spec
spec        PoolSpec: `PoolSpec.from_object(obj)`
reading     from plain objects to structs, with errors that name the field
status      PoolStatus, Condition, Reason
schema      structural schema of a struct; `crd`: the CRD around it
sizing      from a spec, a shape and a device to a `SizingRequest`
"""
