"""Settings of an inspection."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

PREFIX: Final = "PREFIXPOOL_INSPECTION"


class InspectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at, and where to leave what was found."""

    model: Annotated[str, Meta(description="folder of the model, or `organisation/name` on the Hub", min_length=1)]
    revision: Annotated[str, Meta(description="branch, tag or commit on the Hub", min_length=1)] = "main"
    token_file: Annotated[str, Meta(description="file with an access token for the Hub; empty: `HF_TOKEN`, or none")] = ""
    hub: Annotated[str, Meta(description="address of the Hub; empty: `HF_ENDPOINT`, or its own", max_length=1024)] = ""
    output: Annotated[str, Meta(description="file that gets the document as well, if it is there")] = "/dev/termination-log"
