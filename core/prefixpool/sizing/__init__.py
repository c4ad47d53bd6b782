"""How much KV cache fits where: from a model's shape, accelerators and a budget to tokens, replicas and reasons.

Pure and closed form; never imports vLLM. What each module knows:

    config      a config.json, checked
    shape       what of a model matters for memory, read from its config.json
    weights     its parameters, and the bytes that they take as stored
    stored      safetensors files and their headers
    catalogue   well-known models and accelerators
    inspection  what a look at a model's files found, as a document
    kv          how the engine cuts KV memory into blocks and groups of layers
    parallel    what tensor and pipeline parallelism leave on one device
    memory      what one device's memory goes to
    tiers       host and disk
    speed       bandwidth bound on decoding; loading against computing again
    request     what is asked, checked
    reasons     one sentence for a plan; `changes`: what would make it fit
    plan        all of it together: `SizingPlan`
"""
