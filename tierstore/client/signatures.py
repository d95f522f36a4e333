"""What `Client` and `AsyncClient` are for type checkers is in `signatures.pyi`; here both are `Face`.

The verbs stand once, in `face.py` and `remote.py`; the stub says what they give back, at once or to be awaited. A test
holds the parameters of both equal.
"""

from __future__ import annotations

from tierstore.client.face import Face
from tierstore.client.remote import RemoteModel

BlockingVerbs = AwaitedVerbs = Face
BlockingModel = AwaitedModel = RemoteModel
