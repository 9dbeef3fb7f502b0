"""Resources that serve by default, for everybody or inside a ``with`` block."""

from gpumem._defaults import get_default_resource, set_default_resource, using_resource

__all__ = ["get_default_resource", "set_default_resource", "using_resource"]
