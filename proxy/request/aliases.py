"""Further names of models, exact ones and prefixes of names, and the model of a request without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.errors import RequestError
from proxy.settings.front import ANY_END


class ModelAliases:
    """Index over ``models.aliases``: an exact name comes first, then the longest prefix (``NAME*``).

    Args:
        aliases: name, or prefix with a ``*`` behind it, to the model that it stands for.
        is_served: returns True if an engine lists a model by this name, which no prefix then replaces.
    """

    def __init__(self, aliases: Mapping[str, str], is_served: Callable[[str], bool] = lambda _: False) -> None:
        self.exact: Mapping[str, str] = {name: model for name, model in aliases.items() if not name.endswith(ANY_END)}
        """Those that are names of models themselves."""
        prefixes = [(name.removesuffix(ANY_END), model) for name, model in aliases.items() if name.endswith(ANY_END)]
        self._prefixes = sorted(prefixes, key=lambda each: -len(each[0]))
        self._models = frozenset(aliases.values())
        self._is_served = is_served

    def get(self, name: str) -> str | None:
        """The model that a name stands for; None: the name is no alias. O(1) without prefixes, else O(prefixes)."""
        model = self.exact.get(name)
        if model is not None or not self._prefixes:
            return model
        # A list may be unknown: what an alias stands for is a model's own name anyway.
        if name in self._models or self._is_served(name):
            return None
        return next((model for prefix, model in self._prefixes if name.startswith(prefix)), None)


NO_ALIASES = ModelAliases({})
"""None at all."""


def model_of_none(sole_model: str | None) -> str:
    """The model of a request that names none. Raises RequestError (400) if not just one is served."""
    if sole_model is None:
        raise RequestError(
            400,
            "Object missing required field `model`: not just one model is served; GET /v1/models lists them",
            param="model",
            code="invalid_type",
        )
    return sole_model
