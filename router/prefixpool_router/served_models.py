"""`/v1/models` while no replica can be asked: clients that look for their model first shall wait for it, not give it up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from prefixpool import names


def listed(models: Sequence[str], request_id: str) -> web.Response:
    """As engines list them."""
    data = [{"id": model, "object": "model", "created": 0, "owned_by": "prefixpool"} for model in models]
    body = msgspec.json.encode({"object": "list", "data": data})
    headers = {"Server": names.SERVER, names.H_REQUEST_ID: request_id}
    return web.Response(body=body, content_type="application/json", headers=headers)
