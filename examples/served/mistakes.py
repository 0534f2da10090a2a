"""Errors of the API for requests that it does not answer."""

from typing import Any


class Refused(ValueError):
    """A request that is not answered, with a message about the fix.

    Attributes:
        param: the field that is wrong, if it is one.
        status: of HTTP.
        code: one word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        text: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(text)
        self.param, self.status, self.code = param, status, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """It in the API's words."""
        error = {
            "message": _as_text(str(self)),
            "type": find_kind(self.status),
            "param": None if self.param is None else _as_text(self.param),
            "code": self.code,
        }
        return {"error": error}


def find_kind(status: int) -> str:
    """Return the API's word for a status."""
    if status >= 500:
        return "server_error"
    kinds = {401: "authentication_error", 404: "not_found_error"}
    return (kinds | {429: "rate_limit_error"}).get(status, "invalid_request_error")


def _as_text(quoted: str) -> str:
    """Return a text without halves of characters, which a request may have."""
    return quoted.encode(errors="replace").decode()
