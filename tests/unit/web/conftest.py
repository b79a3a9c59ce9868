"""The application with one worker, asked without a network."""

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason='install "vramfit[web]" to test the page\'s API')

from starlette.testclient import TestClient

from vramfit.web.app import create_app


@pytest.fixture(scope="package")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(num_workers=1), base_url="http://127.0.0.1:8765") as made:
        yield made
