"""Formats of strings, as patterns of the whole text.

Of the RFCs that JSON Schema names (https://json-schema.org/draft/2020-12,
validation, section 7.3). February has 29 days in every year.
"""

_TWO = "[0-9]{2}"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|[12][0-9])"
_DATE = f"[0-9]{{4}}-(?:{_LONG}|{_SHORT}|{_FEBRUARY})"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# RFC 3339; a leap second at any time.
_TIME = rf"{_HOURS}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-]{_HOURS})"
# RFC 3339, appendix A: units follow each other without a gap.
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Return RFC 4291's forms: eight groups, or fewer around one "::"."""
    forms = [f"(?:{_H16}:){{7}}{_H16}"]
    for before in range(8):
        head = f"(?:{_H16}:){{{before - 1}}}{_H16}" if before else ""
        most = 7 - before
        tail = f"(?:{_H16}(?::{_H16}){{0,{most - 1}}})?" if most else ""
        forms.append(f"{head}::{tail}")
    return "(?:" + "|".join(forms) + ")"


# RFC 5321, 4.1.2, a mailbox without quoted names.
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_SUBDOMAIN = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_EMAIL = (
    rf"{_ATOM}(?:\.{_ATOM})*@"
    rf"(?:{_SUBDOMAIN}(?:\.{_SUBDOMAIN})*|\[{_IPV4}\])"
)
# RFC 1123.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# RFC 3986, appendix A.
_PERCENT = f"%{_HEX}{{2}}"
_NAME = r"[a-zA-Z0-9\-._~!$&'()*+,;=]"
_PCHAR = f"(?:{_NAME}|[:@]|{_PERCENT})"
_HOST = rf"(?:\[(?:{_ipv6()}|v{_HEX}+\.(?:{_NAME}|:)+)\]|(?:{_NAME}|{_PERCENT})*)"
_AUTHORITY = f"(?:(?:{_NAME}|:|{_PERCENT})*@)?{_HOST}(?::[0-9]*)?"
_ROOTLESS = f"{_PCHAR}+(?:/{_PCHAR}*)*"
_PATH = f"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_ROOTLESS})?|{_ROOTLESS}|)"
_REST = f"(?:{_PCHAR}|[/?])*"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?{_REST})?(?:\#{_REST})?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": _URI,
}
