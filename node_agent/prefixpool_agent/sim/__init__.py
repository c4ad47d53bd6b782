"""`sim`: an engine that speaks vLLM's HTTP API, KV events and metrics without a model (design: 6).

It makes tests and the demo fast and is never the proof that something works with vLLM: the contract tests run against both.
Layers: tokenizer, template, blocks, pool, scheduler, timing are pure; engine, events and the HTTP modules are the shell.
"""
