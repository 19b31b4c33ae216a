"""What `helm test` runs: the release is ready and answers a chat request. No library needed."""

import json
import os
import sys
import urllib.error
import urllib.request

base, seconds = os.environ["BASE_URL"], float(os.environ["TIMEOUT_SECONDS"])
key = os.environ.get("API_KEY", "")


def call(path: str, body: dict[str, object] | None = None) -> bytes:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, headers)
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return bytes(answer.read())


def chat() -> str:
    message = {"role": "user", "content": "Who are you?"}
    body = {"model": os.environ["MODEL"], "messages": [message], "max_tokens": 16}
    choice = json.loads(call("/v1/chat/completions", body))["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason {choice['finish_reason']}")
    return str(choice["message"]["content"])


try:
    call("/ready")
    print("ready")
    if os.environ["KEYS_NEEDED"] and not key:
        print("an API key is needed and tests.apiKeySecret is not set: not asked anything")
    else:
        print("answer:", chat())
except urllib.error.HTTPError as error:
    sys.exit(f"{error.url}: HTTP {error.code}: {error.read(1000).decode('utf-8', 'replace')}")
except (OSError, ValueError, KeyError) as error:
    sys.exit(f"{base}: {error}")
