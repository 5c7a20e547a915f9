"""A client of a served bundle, by the standard library alone: its size, a person it has never seen, similar items.

python examples/serve_client.py [URL]; set TORCHREC_EXT_TOKEN if the server asks for a token.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def ask(
    url: str, path: str, body: dict[str, Any] | None = None, attempts: int = 3
) -> Any:
    """Returns the JSON answer of a server; waits and asks again if it says that the same request may succeed later."""
    request = urllib.request.Request(
        url + path, headers={"Content-Type": "application/json"}
    )
    if body is not None:
        request.data = json.dumps(body).encode()
    if token := os.environ.get("TORCHREC_EXT_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refusal:
        retry_after = refusal.headers.get("Retry-After", "1")
        if refusal.code != 503 or attempts == 1:
            sys.exit(f"{path}: {json.load(refusal)['error']['message']}")
    time.sleep(float(retry_after))
    return ask(url, path, body, attempts - 1)


def names(answer: dict[str, Any]) -> list[str]:
    """Returns the titles of an answer's items, or their ids if the bundle has no titles."""
    return answer.get("titles") or [str(item) for item in answer["items"]]


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Asks one of each."""
    served = ask(url, "/v1/bundle")
    print(
        f"bundle {served['digest'][:12]}: {served['items']} items, {served['users']} users"
    )
    person = served["example_user"]
    answer = ask(url, "/v1/recommend", {"user": person, "k": 3, "titles": True})
    print(f"for {json.dumps(person)}:")
    for name, score in zip(names(answer), answer["scores"], strict=True):
        print(f"  {score:6.3f}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
