"""Error for requests that the API refuses."""

from typing import Any


class Refused(ValueError):
    """A refused request, with a message that names the fix.

    Attributes:
        param: the wrong field, or None.
        status: the HTTP status.
        code: the error code for programs.
        headers: response headers.
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
        """The error in the API's format."""
        error = {
            "message": _as_text(str(self)),
            "type": find_kind(self.status),
            "param": None if self.param is None else _as_text(self.param),
            "code": self.code,
        }
        return {"error": error}


def describe_crash(error: Exception) -> Refused:
    """Return the error for an unexpected exception; the log has the traceback."""
    return Refused(f"the server failed: {type(error).__name__}", status=500)


def find_kind(status: int) -> str:
    """Return the API's error type for an HTTP status."""
    if status >= 500:
        return "server_error"
    kinds = {401: "authentication_error", 404: "not_found_error"}
    return (kinds | {429: "rate_limit_error"}).get(status, "invalid_request_error")


def _as_text(quoted: str) -> str:
    """Replace lone surrogates, which a request's JSON may contain."""
    return quoted.encode(errors="replace").decode()
