"""String formats as patterns of the whole string.

From the RFCs that JSON Schema names (https://json-schema.org/draft/2020-12, validation,
section 7.3), or a subset: no year 0, leap seconds in UTC only, no internationalized
names ("xn--" included), simple regular expressions.
"""

_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
# Two-digit multiples of 4; among four-digit years, without the year 0.
_FOURTH = "(?:[02468][048]|[13579][26])"
_FOURTH_BUT_ZERO = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH_BUT_ZERO}|{_FOURTH_BUT_ZERO}00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"(?:{_YEAR}-(?:{_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_PART = r"(?:\.[0-9]+)?"

_LEAP_SECOND = rf"23:59:60{_PART}(?:[zZ]|[+-]00:00)"
# RFC 3339.
_TIME = rf"(?:{_HOURS}:[0-5][0-9]{_PART}(?:[zZ]|[+-]{_HOURS})|{_LEAP_SECOND})"
# RFC 3339, appendix A: units follow each other without a gap.
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Return RFC 4291's forms: eight groups, or fewer around one "::".

    The last two groups may be an IPv4 address.
    """
    forms = [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{6}}{_IPV4}"]
    for before in range(8):
        head = f"(?:{_H16}:){{{before - 1}}}{_H16}" if before else ""
        most = 7 - before
        tail = f"(?:{_H16}(?::{_H16}){{0,{most - 1}}})?" if most else ""
        forms.append(f"{head}::{tail}")
        if most >= 2:
            forms.append(f"{head}::(?:{_H16}:){{0,{most - 2}}}{_IPV4}")
    return "(?:" + "|".join(forms) + ")"


# RFC 5321, 4.1.2, a mailbox.
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_SUBDOMAIN = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = (
    rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@"
    rf"(?:{_SUBDOMAIN}(?:\.{_SUBDOMAIN})*|\[{_IPV4}\])"
)
# RFC 1123; labels with "--" at the third character (RFC 5890) are excluded. A name
# has at most 253 characters: three labels of 63 and one of 61, or eight of 30.
_ALNUM = "[a-zA-Z0-9]"


def _label(most: int) -> str:
    """Return a pattern of labels up to `most` characters."""
    ends = f"(?:[a-zA-Z0-9-]{{0,{most - 5}}}{_ALNUM})?"
    long = f"[a-zA-Z0-9-]{{0,{most - 5}}}{_ALNUM}"
    third = f"(?:-{_ALNUM}{ends}|{_ALNUM}(?:-(?:{long})?|{_ALNUM}{ends})?)"
    return f"{_ALNUM}(?:{_ALNUM}|[a-zA-Z0-9-]{third})?"


_HOSTNAME = (
    rf"(?:{_label(63)}\.){{0,3}}{_label(61)}|(?:{_label(30)}\.){{0,7}}{_label(30)}"
)
# RFC 3986, appendix A.
_PERCENT = f"%{_HEX}{{2}}"
_NAME = r"[a-zA-Z0-9\-._~!$&'()*+,;=]"
_PCHAR = f"(?:{_NAME}|[:@]|{_PERCENT})"
_HOST = rf"(?:\[(?:{_ipv6()}|v{_HEX}+\.(?:{_NAME}|:)+)\]|(?:{_NAME}|{_PERCENT})*)"
_AUTHORITY = f"(?:(?:{_NAME}|:|{_PERCENT})*@)?{_HOST}(?::[0-9]*)?"
_ROOTLESS = f"{_PCHAR}+(?:/{_PCHAR}*)*"
_ROOTED = f"//{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_ROOTLESS})?"
_REST = f"(?:{_PCHAR}|[/?])*"
_TAIL = rf"(?:\?{_REST})?(?:\#{_REST})?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_ROOTED}|{_ROOTLESS}|){_TAIL}"
_RELATIVE = f"(?:{_ROOTED}|(?:{_NAME}|@|{_PERCENT})+(?:/{_PCHAR}*)*|){_TAIL}"
_URI_REFERENCE = f"(?:{_URI}|{_RELATIVE})"
# RFC 6570.
_VARIABLE = f"(?:[a-zA-Z0-9_]|{_PERCENT})(?:\\.?(?:[a-zA-Z0-9_]|{_PERCENT}))*"
_VARIABLE += r"(?::[1-9][0-9]{0,3}|\*)?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}}"
_URI_TEMPLATE = rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|{_PERCENT}|{_EXPRESSION})*"
# RFC 6901.
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
# ECMA-262: characters, classes, quantifiers and alternatives, without groups.
_SIGN = r"(?:[\w \-@:,;=<>/!#%&'\"`~]|\\[dDwWsS.^$*+?()\[\]{}|\\/]|\.)"
_CLASS = r"(?:\[\^?(?:[A-Za-z0-9_]|A-Z|a-z|0-9|\\[dws])+\])"
_PIECES = rf"(?:(?:{_SIGN}|{_CLASS})(?:[*+?]|\{{[0-9]{{1,3}}\}})?)*"
_REGEX = rf"\^?{_PIECES}(?:\|{_PIECES})*\$?"
# A simpler form, for URIs with counted characters.
_SHORT_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+\-.]*://{_NAME}+(?::[0-9]+)?(?:/(?:{_NAME}|[:@/])*)?"
    rf"(?:\?(?:{_NAME}|[:@/?])*)?(?:\#(?:{_NAME}|[:@/?])*)?"
)


def _uuid(version: str | None = None) -> str:
    """Return RFC 9562's form, of any version or a given one."""
    kinds = f"{_HEX}{{4}}-{_HEX}{{4}}"
    if version:
        kinds = f"{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}"
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{kinds}-{_HEX}{{12}}"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-email": _EMAIL,
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{_POINTER})",
    "regex": _REGEX,
}
# Simpler forms of formats that would take many states per counted character.
COUNTED = dict.fromkeys(("uri", "iri", "uri-reference", "iri-reference"), _SHORT_URI)
