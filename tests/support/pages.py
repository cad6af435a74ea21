"""What a report's file holds."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def packed(page: str, part: str) -> str:
    """The text of a compressed part of the page: "library" or "data"."""
    found = re.search(rf'<script type="text/plain" id="gs-{part}">([^<]*)</script>', page)
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1])).decode()


def data_of(page: str) -> dict[str, Any]:
    """The data of the page."""
    return json.loads(packed(page, "data"))
