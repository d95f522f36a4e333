"""An online store for Feast: feature views with one field of embeddings, held by a running service.

    # feature_store.yaml
    online_store:
      type: tierstore.feast.TierstoreOnlineStore
      url: http://127.0.0.1:8000

Needs Feast, the extra `feast`. `docs/feast.md` says which views can be held, and how.
"""

from __future__ import annotations

try:
    import feast as _feast  # noqa: F401
except ImportError as error:
    from tierstore.errors import MissingExtra

    raise MissingExtra(f"tierstore.feast needs Feast: pip install 'tierstore[feast]' ({error})") from error

from tierstore.feast.online_store import TierstoreOnlineStore, TierstoreOnlineStoreConfig

__all__ = ["TierstoreOnlineStore", "TierstoreOnlineStoreConfig"]
