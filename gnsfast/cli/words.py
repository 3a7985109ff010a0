# SPDX-License-Identifier: Apache-2.0
"""Reads the files in ``templates/``: what the commands say, and how."""

from typing import Any

import jinja2


def template(name: str, **filters: Any) -> jinja2.Template:
    """A template with its own filters; what it prints into HTML is escaped."""
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("gnsfast.cli"),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters |= filters
    pages.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return pages.get_template(name)
