"""The documented JSON Schema keywords, with examples for each.

    python tests/support/grammar/schema_keywords.py     # rewrite the page's table

A row is (keywords, supported part, cases); a case is (schema, matching texts, other
texts), with texts separated by blanks.
"""

from support.paths import ROOT

PAGE = ROOT / "docs" / "how-to" / "structured-output.md"
BEGIN, END = "<!-- keywords -->\n", "<!-- end -->\n"

ONE, TWO = {"const": 1}, {"const": 2}
ROWS = [
    (
        "`type`",
        "one or several; where none is named, it follows from the other keywords",
        [
            ({"type": ["null", "integer"]}, "null 3", '"a" 1.5 true'),
            ({"minLength": 2}, '"ab"', '"a" 1 null'),
        ],
    ),
    (
        "`enum`, `const`",
        "what holds for the words beside it, judged as values: true is not 1, 1.0 is",
        [
            ({"enum": [True, 1.0, {"b": 1, "a": 2}]}, 'true 1 {"b":1,"a":2}', "1.0"),
            ({"enum": ["a", "abc", 3], "maxLength": 2}, '"a" 3', '"abc"'),
            ({"enum": [1, True], "type": "boolean"}, "true", "1"),
            ({"enum": [{"b": 1}], "properties": {"a": {}}}, '{"b":1}', "{}"),
            ({"enum": [0.00000001, 1e22]}, "1e-08 10000000000000000000000", "1"),
        ],
    ),
    (
        "`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`",
        "written without an exponent, zero without a sign; draft 4's flags, too",
        [
            ({"minimum": -0.0, "maximum": 1.5}, "0 1.50 1", "-1 2 1e0"),
            ({"maximum": 3, "exclusiveMaximum": True}, "2.9 -7", "3 4"),
            ({"exclusiveMaximum": True, "type": "integer"}, "7", "7.5"),
            ({"minimum": 3, "maximum": 3}, "3 3.0", "2 4"),
        ],
    ),
    (
        "`multipleOf`",
        "also of decimals, digit by digit; written without an exponent",
        [
            ({"type": "integer", "multipleOf": 7}, "0 -7 14 700", "1 8 -13 7.0"),
            ({"multipleOf": 0.01}, "0.1 3 -2.50 0.010", "0.001 0.015 1e1"),
            ({"type": "integer", "multipleOf": 1.5}, "3 -6", "1 2"),
            ({"multipleOf": 100}, "0 300", "30 110"),
        ],
    ),
    (
        "`minLength`, `maxLength`",
        "in characters; a long `maxLength` may be lowered (see below)",
        [
            ({"minLength": 2.0, "maxLength": 3}, '"ab" "\\n\\"" "é€😀"', '"a" "abcd"'),
            ({"format": "date", "maxLength": 12}, '"2024-01-31"', '"2024-01-32"'),
        ],
    ),
    (
        "`pattern`",
        r"of ECMA-262, found anywhere; also `\p{L}`, `\b` and look-around that is not "
        r"nested; not `\1`, `\Z`, `(?i)`, `a++`",
        [
            ({"pattern": "^a.$"}, '"ab"', '"a\u2028" "a" "abc"'),
            ({"pattern": "^(^foo$|^bar$)$"}, '"foo" "bar"', '"foobar"'),
            ({"pattern": "^(?!con$)\\w+$"}, '"co" "cone"', '"con" ""'),
            ({"pattern": "^\\p{Lu}{,2}$"}, '"É{,2}"', '"É" "é{,2}"'),
            ({"pattern": "\\bis\\b"}, '"is" "it-is."', '"this"'),
            ({"pattern": "^[^]\\u{61}$"}, '"\\na"', '"a"'),
            ({"pattern": "^(?:(?!ab).)*$"}, '"ba"', '"cab"'),
        ],
    ),
    (
        "`format`",
        "`date`, `time`, `date-time`, `duration`, `email`, `idn-email`, `hostname`, "
        "`idn-hostname`, `ipv4`, `ipv6`, `uuid` and `uuid1` to `uuid8`, `uri`, "
        "`uri-reference`, `iri`, `iri-reference`, `uri-template`, "
        "`json-pointer`, `relative-json-pointer`, `regex`; others are ignored",
        [
            (
                {"format": "date"},
                '"2024-02-29" "2000-02-29" "2023-12-31"',
                '"2023-02-29" "1900-02-29" "0000-01-01" "2024-04-31"',
            ),
            (
                {"format": "time"},
                '"23:59:60Z" "00:00:00.5+01:30"',
                '"24:00:00Z" "12:00:60Z" "12:00:00"',
            ),
            (
                {"format": "hostname"},
                '"a-b.example.com"',
                f'"a_b" "-a" "xn--a" "{"a" * 64}" "{".".join(["a" * 63] * 4)}" "a."',
            ),
            ({"format": "ipv6"}, '"::ffff:1.2.3.4" "1::2"', '"1::2::3" "1.2.3.4"'),
            ({"format": "uri-reference"}, '"a/b?c" "#d" ""', '"a:b:c d" "\\\\"'),
            ({"format": "uri-template"}, '"/a{?b,c*}"', '"/a{" "{}"'),
            ({"format": "json-pointer"}, '"" "/a~1b"', '"a" "/~2"'),
            ({"format": "relative-json-pointer"}, '"0#" "1/a"', '"" "01"'),
            ({"format": "regex"}, '"^[a-z]+b.*|c$"', '"(" "a**"'),
            ({"format": "iri"}, '"a:b"', '"a"'),
            ({"format": "colour"}, '"anything"', "1"),
        ],
    ),
    (
        "`items`, `prefixItems`, `additionalItems`",
        "none behind `prefixItems` unless `items` says so",
        [
            ({"prefixItems": [ONE, TWO]}, "[] [1] [1,2]", "[2] [1,2,1]"),
            ({"items": [ONE], "additionalItems": TWO}, "[1,2,2]", "[1,1]"),
            (
                {"allOf": [{"prefixItems": [ONE]}, {"items": {"enum": [1, 2]}}]},
                "[1] [1,2]",
                "[2] [1,3]",
            ),
        ],
    ),
    (
        "`minItems`, `maxItems`",
        "a large `maxItems` may be lowered (see below)",
        [({"items": ONE, "minItems": 1, "maxItems": 2}, "[1] [1,1]", "[] [1,1,1]")],
    ),
    (
        "`uniqueItems`",
        "of listed values, more than four in the order of the list; of other strings "
        "and numbers, each beginning with another sign, in ascending order; of a "
        "tuple's items that exclude each other",
        [
            (
                {"items": {"enum": ["a", "b"]}, "uniqueItems": True},
                '[] ["a"] ["b","a"]',
                '["a","a"]',
            ),
            (
                {"items": {"enum": [1, 2, 3, 4, 5, 1.0]}, "uniqueItems": True},
                "[1,3,5]",
                "[1,1] [3,1]",
            ),
            (
                {"items": {"type": ["string", "integer"]}, "uniqueItems": True},
                '[] ["a","b"] ["","x",3,41]',
                '["a","a"] ["ab","ac"] [4,41] [0,-0] [1,true] ["b","a"]',
            ),
            (
                {"items": {"type": "number"}, "uniqueItems": True, "minItems": 2},
                "[1.0,2] [-1,0]",
                "[1,1.0] [1] [-0,0] [10,1e1]",
            ),
            ({"items": {"type": "boolean"}, "uniqueItems": True}, "[true]", "[1]"),
            ({"items": {}, "maxItems": 1, "uniqueItems": True}, "[7]", "[7,7]"),
            ({"prefixItems": [ONE, TWO], "uniqueItems": True}, "[1,2]", "[1,1]"),
        ],
    ),
    (
        "`contains`, `minContains`, `maxContains`",
        "of up to 8 items, not beside `prefixItems`",
        [
            (
                {"items": {"enum": [1, 2]}, "contains": ONE},
                "[1] [2,1,2] [1,1]",
                "[] [2]",
            ),
            (
                {"items": {"enum": [1, 2]}, "contains": ONE, "maxContains": 1},
                "[2,1]",
                "[1,1] [2]",
            ),
            (
                {"items": {"enum": [1, 2]}, "contains": ONE, "minContains": 0},
                "[] [2]",
                "[3]",
            ),
        ],
    ),
    (
        "`properties`, `required`",
        "in the order in which they are named, then those that `required` alone names",
        [
            (
                {"properties": {"a": ONE, "b": TWO}, "required": ["b", "c"]},
                '{"b":2,"c":[]} {"a":1,"b":2,"c":null}',
                '{"b":2} {"c":1,"b":2} {"a":1,"b":2,"c":1,"d":1}',
            ),
        ],
    ),
    (
        "`additionalProperties`, `patternProperties`",
        "a key that patterns find holds for all of them",
        [
            (
                {"properties": {"a": ONE}, "additionalProperties": TWO},
                '{"a":1,"b":2,"aa":2}',
                '{"a":2} {"b":2,"a":1}',
            ),
            (
                {
                    "patternProperties": {"^x": {"enum": [1, 2]}, "y$": {"enum": [2]}},
                    "additionalProperties": False,
                    "required": ["xy"],
                },
                '{"xy":2} {"xy":2,"x":1,"xxy":2}',
                '{"xy":1} {"xy":2,"xxy":1} {"xy":2,"z":1} {}',
            ),
            (
                {
                    "allOf": [
                        {"properties": {"a": ONE}, "additionalProperties": False}
                    ],
                    "properties": {"b": TWO},
                },
                '{} {"a":1}',
                '{"b":2}',
            ),
        ],
    ),
    (
        "`propertyNames`",
        "",
        [
            (
                {"propertyNames": {"maxLength": 1}, "additionalProperties": ONE},
                '{} {"a":1,"b":1}',
                '{"ab":1}',
            ),
            (
                {"propertyNames": {"enum": ["b"]}, "properties": {"a": ONE, "b": TWO}},
                '{"b":2}',
                '{"a":1}',
            ),
        ],
    ),
    (
        "`minProperties`, `maxProperties`",
        "properties without a name count as one for `minProperties`: their keys may be "
        "the same",
        [
            (
                {"properties": {"a": ONE, "b": ONE, "c": ONE}, "minProperties": 2},
                '{"a":1,"c":1} {"a":1,"b":1,"c":1}',
                '{} {"b":1}',
            ),
            (
                {"additionalProperties": ONE, "minProperties": 1, "maxProperties": 2},
                '{"a":1} {"a":1,"b":1}',
                '{} {"a":1,"b":1,"c":1}',
            ),
            (
                {"properties": {"a": ONE, "b": ONE}, "maxProperties": 1},
                '{} {"b":1}',
                '{"a":1,"b":1}',
            ),
        ],
    ),
    (
        "`dependentRequired`, `dependentSchemas`, `dependencies`",
        "",
        [
            (
                {
                    "properties": {"a": ONE, "b": TWO},
                    "dependentRequired": {"a": ["b"]},
                },
                '{} {"b":2} {"a":1,"b":2}',
                '{"a":1}',
            ),
            (
                {
                    "properties": {"a": ONE, "b": {"type": "integer"}},
                    "dependencies": {"a": {"properties": {"b": {"minimum": 5}}}},
                },
                '{"b":1} {"a":1,"b":5}',
                '{"a":1,"b":1}',
            ),
        ],
    ),
    (
        "`unevaluatedProperties`, `unevaluatedItems`",
        "what the way that was taken speaks of is evaluated",
        [
            (
                {
                    "allOf": [{"properties": {"a": ONE}}],
                    "properties": {"b": TWO},
                    "unevaluatedProperties": False,
                },
                '{"a":1,"b":2}',
                '{"c":1}',
            ),
            (
                {
                    "properties": {"c": ONE},
                    "allOf": [
                        {"properties": {"a": ONE}, "unevaluatedProperties": False}
                    ],
                },
                '{"a":1}',
                '{"a":1,"c":1} {"c":1}',
            ),
            (
                {"prefixItems": [ONE], "unevaluatedItems": TWO},
                "[1] [1,2,2]",
                "[1,1]",
            ),
        ],
    ),
    (
        "`$ref`, `$dynamicRef`, `$recursiveRef`",
        "to any place of the schema, anchors and `$id` in it; recursion as often as "
        "`recursion=` says; a dynamic anchor of one place",
        [
            (
                {
                    "$id": "https://example.com/a",
                    "$ref": "b#x",
                    "$defs": {
                        "b": {"$id": "b", "$defs": {"c": {"$anchor": "x"} | ONE}}
                    },
                },
                "1",
                "2",
            ),
            (
                {"properties": {"a": {"$ref": "#"}}},
                '{} {"a":{"a":{}}}',
                '{"a":1} {"a":{"a":{"a":{"a":{}}}}}',
            ),
            (
                {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "properties": {"a": {"$ref": "#/definitions/b", "minimum": 5}},
                    "definitions": {"b": {"type": "integer"}},
                },
                '{"a":1}',
                '{"a":"b"}',
            ),
        ],
    ),
    (
        "`allOf`, `anyOf`",
        "together in up to 512 ways",
        [
            (
                {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"minLength": 3}]},
                '"aab"',
                '"ab" "aa"',
            ),
            (
                {
                    "allOf": [
                        {"anyOf": [ONE, TWO]},
                        {"anyOf": [TWO, {"const": 3}]},
                    ]
                },
                "2",
                "1 3",
            ),
        ],
    ),
    (
        "`oneOf`, `not`, `if`, `then`, `else`",
        "where it can be said what holds when a schema does not; by values, so that "
        "nothing is left that two branches of `oneOf` hold for",
        [
            ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "1 3.5", "4 3"),
            (
                {
                    "oneOf": [
                        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                        {"properties": {"b": {"type": "integer"}}},
                    ]
                },
                '{"b":1} {"a":"x"} {"a":1,"b":"x"}',
                '{"a":1} {"a":1,"b":1}',
            ),
            ({"type": "string", "not": {"pattern": "^a"}}, '"b"', '"ab"'),
            ({"type": "integer", "not": {"enum": [0, 7]}}, "1 70", "0 -0 7"),
            (
                {
                    "properties": {"kind": {"enum": ["a", "b"]}, "n": {}},
                    "required": ["kind"],
                    "if": {"properties": {"kind": {"const": "a"}}},
                    "then": {"required": ["n"]},
                    "else": {"properties": {"n": False}},
                },
                '{"kind":"a","n":1} {"kind":"b"}',
                '{"kind":"a"} {"kind":"b","n":1}',
            ),
        ],
    ),
    (
        "others",
        "ignored, as the standard says, unless `strict=True` (then an error but for "
        "annotations and names that begin with `x-`)",
        [({"type": "integer", "title": "t", "frobnicate": 1, "x-y": 2}, "5", '"5"')],
    ),
]


def make_table() -> str:
    """Return the page's table."""
    rows = ["| keywords | what is served |", "|---|---|"]
    rows += [f"| {words} | {served} |" for words, served, _ in ROWS]
    return "\n".join(rows) + "\n"


def make_page() -> str:
    """Return the page with the new table."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + "\n" + make_table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
