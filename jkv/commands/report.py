"""What the doctor found, printed as it comes."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Report:
    """Facts about the machine, and a finding for each check."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def add(self, verdict: str, what: str, detail: str = "") -> None:
        """Note a finding: "ok", "FAILED", "warning" or "not checked"."""
        self.findings.append({"verdict": verdict, "what": what, "detail": detail})
        print(f"  {verdict:<12}{what}{': ' if detail else ''}{detail}", flush=True)

    @property
    def has_failed(self) -> bool:
        """Whether any check failed."""
        return any(each["verdict"] == "FAILED" for each in self.findings)
