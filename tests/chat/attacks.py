"""Templates that nobody should write, by what comes of them: rendering takes little time and memory with any of them.

What is written here as 5,000 or 60 times is what would take hours or gigabytes without limits.
"""

from __future__ import annotations

from typing import Final

_MAX_SOURCE: Final = 65_000


def fill(head: str, unit: str, tail: str = "") -> str:
    """Return a template as long as templates may be, of units in which ``#`` is their number."""
    parts, length = [head], len(head) + len(tail)
    for number in range(_MAX_SOURCE):
        part = unit.replace("#", str(number))
        length += len(part)
        if length > _MAX_SOURCE:
            break
        parts.append(part)
    return "".join([*parts, tail])


def sets(count: int) -> str:
    return "".join(f"{{%set a{number}=b%}}" for number in range(count))


# A list that comes up in others 131,072 times, and then grows.
GROWN: Final = (
    "{% set a=[] %}{% set ns=namespace(x=a) %}{% for i in range(16) %}{% set ns.x=[ns.x,ns.x] %}{% endfor %}"
    "{% for i in range(1000) %}{% set _=a.append('a'*1000~i) %}{% endfor %}"
)

# For what is not theirs: attributes of Python, files, other templates.
REACHING: Final = {
    "cve": (
        "{% for x in ().__class__.__base__.__subclasses__() %}"
        "{% if 'warning' in x.__name__ %}"
        "{{x()._module.__builtins__['__import__']('os').popen('touch /tmp/retr0reg')}}"
        "{%endif%}{% endfor %}"
    ),
    "extend": "{{ [].extend([1]) }}",
    "insert": "{{ [].insert(0, 1) }}",
    "sort in place": "{{ [1].sort() }}",
    "append as item": "{{ []['append'](1) }}",
    "pop of a mapping": "{{ {'a': 1}.pop('a') }}",
    "what append is of": "{{ [].append._values.a }}",
    "cve2": "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('id').read() }}",
    "cve3": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "cve4": "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}",
    "attrfmt": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "ns": "{% set n = namespace(__class__=1) %}",
    "wordwrap": "{{ 'a'|wordwrap(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as o %}",
    "enc": "{{ 'a'.encode() }}",
    "bytes": "{{ (5).to_bytes(100000).hex()|length }}",
    "striptags": "{{ ('<'*8000000)|striptags|length }}",
    "groupby": "{{ range(100)|groupby('real')|list|length }}",
    "bytesrep": "{% set b=(5).to_bytes(100000) %}{{ b.replace((0).to_bytes(1), b)|length }}",
    "bytesjoin": "{% set b=(5).to_bytes(100000) %}{{ b.join([b]*100000)|length }}",
    "striptags again": "{{ ('<!---->'*590000)|striptags }}",
    "urlencode": "{{ ('😀'*4000000)|urlencode|length }}",
    "urlencode2": "{{ ({'a':'😀'*4000000})|urlencode|length }}",
    "xmlattr": "{{ {'a':1}|xmlattr }}",
    "blockself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "super": "{% block a %}{{ super() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ '<'*1000000 }}{% endautoescape %}",
    "gen": "{% set g=range(9)|map('string') %}{{ g.gi_frame.f_globals }}",
    "macattr": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "fmtidx": ("{{ '{0[__class__]}'.format(raise_exception) }}{{ '{0.__globals__[os]}'.format(strftime_now) }}"),
    "init": "{{ namespace.__init__.__globals__ }}",
    "of_t": "{{ 'a'.of_template('b') }}",
    "of_t2": "{{ ('a'|attr('of_template'))('b') }}",
    "of_t3": "{{ ('a'|map(attribute='of_template')|first)('b') }}",
    "of_t4": "{{ 'a'['of_template']('x') }}",
}

# For more time, text, numbers, lists or code than templates have.
LARGE: Final = {
    "append while walking": "{% set l=[1] %}{% for x in l %}{% set _=l.append(x) %}{% endfor %}",
    "append while mapping": "{% set l=[1] %}{% for x in l|map('string') %}{% set _=l.append(x) %}{% endfor %}",
    "append without end": (
        "{% set l=[] %}{% for i in range(100000) %}{% for j in range(100000) %}{% set _=l.append(1) %}{% endfor %}"
        "{% endfor %}"
    ),
    "append long texts": ("{% set l=[] %}{% for i in range(100000) %}{% set _=l.append('a'*100000~i) %}{% endfor %}"),
    "append to what was given": "{{ messages.append(messages) }}{{ messages|length }}",
    "append to itself": "{% set l=[] %}{% set _=l.append(l) %}{{ l }}",
    "append to itself and compare": "{% set l=[] %}{% set _=l.append(l) %}{% if [l]==[[l]] %}{% endif %}",
    "append deeper and deeper": (
        "{% set ns=namespace(x=[]) %}{% for i in range(100000) %}{% set m=[] %}{% set _=m.append(ns.x) %}"
        "{% set ns.x=m %}{% endfor %}{{ ns.x }}"
    ),
    **{
        f"grown {use}": GROWN + use
        for use in (
            *("{{ ns.x }}", "{{ ns.x|string|length }}", "{{ ns.x ~ 'a' }}", "{{ ns.x|tojson|length }}"),
            *("{{ [ns.x]|join }}", "{{ '{}'.format(ns.x) }}", "{{ '%s'|format(ns.x) }}", "{{ '%s' % ns.x }}"),
            *("{% if ns.x == ns.x[0] %}{% endif %}", "{% if 1 in [ns.x] %}{% endif %}", "{{ [1].count(ns.x) }}"),
            *("{{ ns.x.index(1) }}", "{{ [ns.x]|map('string')|list }}", "{{ ns.x|sum(start=[]) }}", "{{ ns.x*2 }}"),
            *("{{ ns.x is in([1]) }}", "{{ {'a': ns.x} }}", "{{ dict(a=ns.x) }}", "{{ ns.x + [1] }}", "{{ ns.x[1:] }}"),
            *("{{ messages[ns.x].a }}", "{{ {}[ns.x].a }}", "{{ ns[ns.x].a }}", "{{ raise_exception(ns.x) }}"),
            *("{% for i in [1] %}{{ loop.changed(ns.x) }}{% endfor %}", "{{ 'a'.join(ns.x) }}", "{{ cycler(ns.x) }}"),
            *("{% set y %}{{ ns.x }}{% endset %}", "{% for a, b in ns.x %}{{ a }}{% endfor %}"),
            "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(ns.x) }}",
        )
    },
    "loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "macro": ("{% macro f(n) %}{{ f(n-1) if n else '' }}{{ f(n-1) if n else '' }}{% endmacro %}{{ f(60) }}"),
    "mul": "{{ 'a' * 10000000000 }}",
    "mul2": "{{ 10000000000 * 'a' }}",
    "listmul": "{{ [0] * 10000000000 }}",
    "pow": "{{ 9 ** 999999999 }}",
    "powneg": "{% set x = 10**15 %}{{ x*x*x*x*x*x*x*x }}",
    "double": (
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(100) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "plus": (
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(100) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "out": "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
    "center": "{{ 'a'|center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "pct": "{{ '%10000000000d' % 1 }}",
    "percent by name": "{{ '%(a)99999999d' % {'a': 1} }}",
    "percent by nested name": "{{ '%((a))99999999d' % {'(a)': 1} }}",
    "percent by precision": "{{ '%- 5.99999999f' % 1.5 }}",
    "percent by value of precision": "{{ '%.*f' % (99999999, 1.5) }}",
    "pctstar": "{{ '%*d' % (10000000000, 1) }}",
    "fmtf": "{{ '%10000000000d'|format(1) }}",
    "fmt": "{{ '{:10000000000}'.format(1) }}",
    "fmtnest": "{{ '{:{}}'.format(1, 10000000000) }}",
    "nest": (
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "nesteq": (
        "{% set ns = namespace(x=['a'],y=['a']) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
        "{{ ns.x == ns.y }}"
    ),
    "nestdict": (
        "{% set ns = namespace(x={'a':1}) %}{% for i in range(60) %}"
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|tojson }}"
    ),
    "listadd": ("{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"),
    "replace": "{% set x = 'a'*1000000 %}{{ x|replace('', x) }}",
    "replace2": "{% set x = 'a'*1000000 %}{{ x.replace('a', x) }}",
    "replace3": "{% set x = ('a'*1000000)|tojson %}{{ x.replace('a', x) }}",
    "join": "{% set x = 'a'*1000000 %}{{ (x*1)|join(x) }}",
    "join2": "{% set x = 'a'*100000 %}{{ range(100000)|join(x) }}",
    "join3": "{{ ('x'*100000).join(range(100000)|map('string')|list) }}",
    "indent": "{{ ('\n'*1000000)|indent(99999) }}",
    "indent2": "{{ ('\n'*1000000)|indent('a'*99999) }}",
    "tojson": "{{ [[1]]|tojson(indent=10000000) }}",
    "list": "{{ ('a'*8000000)|list|length }}",
    "rev": "{{ ('a'*8000000)|reverse|list }}",
    "sort": "{{ ('ab'*4000000)|sort }}",
    "strftime": "{{ strftime_now('%Y'*1000000) }}",
    "sum": "{{ ([('a'*100000)] * 1000)|sum(start='') }}",
    "huge": "a" * (1 << 19),
    "caller": "{% macro a() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call a() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "setblock": (
        "{% set x %}{% for i in range(100000) %}"
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        "aaaaaaaaaaaaaaaa{% endfor %}{% endset %}{{ x|length }}"
    ),
    "title": "{{ ('a'*8000000)|title|length }}{{ ('a '*4000000)|title|length }}",
    "unique": "{{ ('ab'*4000000)|unique|list }}",
    "splitws": "{{ ('a '*4000000).split()|length }}",
    "splitlines": "{{ ('a\n'*4000000).splitlines()|length }}",
    "split": "{{ ('aa'*4000000).split('a')|length }}",
    "dictkeys": (
        "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}"
        "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{% set d = {ns.x: 1} %}"
    ),
    "wc": "{{ ('a '*4000000)|wordcount }}",
    "truncate": "{{ ('a '*4000000)|truncate(1000)|length }}",
    "in": "{% set x='a'*4000000 %}{% for i in range(100000) %}{{ (x~'b') in (x~'c') }}{% endfor %}",
    "gt": "{% set x=('a'*4000000)|list %}",
    "views": (
        "{% set ns=namespace(x={'a':1}) %}{% for i in range(60) %}"
        "{% set ns.x=dict(a=ns.x.items(),b=ns.x.items()) %}{% endfor %}{{ ns.x }}"
    ),
    "viewlist": (
        "{% set ns=namespace(x={'a':1}) %}{% for i in range(60) %}"
        "{% set ns.x=dict(a=ns.x.values(),b=ns.x.values()) %}{% endfor %}"
        "{{ ns.x|string|length }}"
    ),
    "tuplekeys": (
        "{% set ns=namespace(x=('a',)) %}{% for i in range(16) %}"
        "{% set ns.x=(ns.x,ns.x) %}{% endfor %}{% set d={ns.x:1} %}{{ [d]*100000 }}"
    ),
    "sepjson": "{% set x='a'*4000000 %}{{ ([1]*200000)|tojson(separators=(x,x)) }}",
    "indstr": "{{ ([1]*200000)|tojson(indent='a'*100000) }}",
    "inddeep": (
        "{% set ns=namespace(x=[1]*200000) %}{% for i in range(500) %}"
        "{% set ns.x=[ns.x] %}{% endfor %}{{ ns.x|tojson(indent=64) }}"
    ),
    "sumlist": "{{ ([[1]]*100000)|sum(start=[]) }}",
    "inthex": "{{ ('9'*4000000)|int(base=16) % (('7'*1500000)|int(base=16)) }}",
    "intdiv": "{% set a=('9'*4000000)|int(base=16) %}{{ a // (('7'*2000000)|int(base=16)) }}",
    "frombytes": "{% set a=(5).from_bytes(('9'*200000)|list|map('int')|list,'big') %}{{ a // (a-1) }}",
    "indentcr": "{{ ('\\r'*4000)|indent(99999,blank=true)|length }}",
    "indentcr2": "{{ ('a\\r'*1000000)|indent(99999)|length }}",
    "pctdict": "{{ ('%(a)s'*800000) % {'a':'x'*4000000} }}",
    "pctwide": "{{ ('%(a)9999d'*400000) % {'a':1} }}",
    "pctlist": "{{ ('%(a)s'*800000) % {'a':[1]*200000} }}",
    "fmtwide": "{{ ('{:9999}'*500000).format(*([1]*100000)) }}",
    "fmtwide2": "{{ ('{0:9999}'*500000).format(1) }}",
    "fmtlist": "{{ ('{0}'*1000000).format([1]*200000) }}",
    "fmtbrace": "{{ ('{{'*2000000).format() }}",
    "striptags3": "{{ (('<!---->'*590000)|escape).striptags() }}",
    "cmptext": "{% set x='a'*4000000 %}{% set y='a'*4000000 %}{{ ([x]*200000)==([y]*200000) }}",
    "cmpin": "{% set x='a'*4000000 %}{% set y='a'*3999999~'b' %}{{ x in ([y]*200000) }}",
    "slices2": "{% set l=[1]*200000 %}{% for i in range(100000) %}{% if l[1:] %}{% endif %}{% endfor %}",
    "setprint2": ("{% set l=[1]*200000 %}{% set x %}{% for i in range(100000) %}{{ l }}{% endfor %}{% endset %}"),
    "hold": (
        "{% set ns=namespace(l=[],x='a'*4000000) %}{% for i in range(100000) %}{% set ns.l=ns.l+[ns.x~i] %}{% endfor %}"
    ),
    "hold wide": (
        "{% set ns=namespace(l=[],x='😀'*4000000) %}{% for i in range(100000) %}"
        "{% set ns.l=ns.l+[ns.x~i] %}{% endfor %}"
    ),
    "hold macro": "{% macro f(n,x) %}{% set y = x~n %}{{ f(n+1,y) }}{% endmacro %}{{ f(0,'a'*4000000) }}",
    "upper": "{{ ('ß'*4000000)|upper|length }}",
    "ﬃ": "{{ ('ﬃ'*4000000).upper()|length }}",
    "casefold": "{{ ('ﬃ'*4000000).casefold()|length }}",
    "swapcase": "{{ ('ﬃ'*4000000).swapcase()|length }}",
    "repr": "{{ ['\U000e0001'*4000000] }}",
    "repr2": "{{ ['\U000e0001'*4000000]|string|length }}",
    "jsonesc": "{{ ('😀'*4000000)|tojson(ensure_ascii=true)|length }}",
    "escape": "{{ ('<'*4000000)|e|length }}",
    "selectin": "{% set l=range(100000)|list %}{{ l|select('in', l)|list|length }}",
    "cycle": "{% for i in range(100000) %}{{ loop.cycle(*range(100000)) }}{% endfor %}",
    "changed": ("{% set x=range(100000)|list %}{% for i in range(100000) %}{{ loop.changed(x+[i]) }}{% endfor %}"),
    "deepkey": "{% set ns=namespace(x=()) %}{% for i in range(100000) %}{% set ns.x=("
    + "(" * 60
    + "ns.x"
    + ",)" * 60
    + ",) %}{% endfor %}{{ {ns.x:1} }}",
    "deepcmp": (
        "{% set ns=namespace(x=(),y=()) %}{% for i in range(2000) %}"
        "{% set ns.x=(ns.x,) %}{% set ns.y=(ns.y,) %}{% endfor %}{{ ns.x==ns.y }}"
    ),
    "joiner": "{% set j=joiner('a'*4000000) %}{% for i in range(1000) %}{{ j() }}{% endfor %}",
    "find": ("{% set x='a'*2000000~'b' %}{% for i in range(100000) %}{{ ('a'*4000000).find(x) }}{% endfor %}"),
    "count": "{% set x='a'*4000000 %}{% for i in range(100000) %}{{ x.count('ab') }}{% endfor %}",
    "splitmany": "{{ ('aa'*2000000).split('a')|length }}",
    "rsplit": "{{ ('a '*2000000).rsplit()|length }}",
    "splitlines again": "{{ ('a\\n'*2000000).splitlines()|length }}",
    "zfill": "{% for i in range(100000) %}{{ 'a'.zfill(100000) }}{% endfor %}",
    "fromkeys": (
        "{% set d={}.fromkeys(range(100000)|list) %}{% for i in range(100000) %}"
        "{% if d.keys()-d.keys() %}{% endif %}{% endfor %}"
    ),
    "fk2": "{% set d={}.fromkeys(range(100000)|list, 'x'*4000000) %}{{ d }}",
    "dictbatch": "{{ [1]|batch(100000,'x'*4000000)|list }}",
    "batches": "{{ (range(100000)|batch(100000,1)|list)*100 }}",
    "slicefill": "{{ range(100000)|slice(100000,'x')|list|length }}",
    "dense": fill("", "{{a}}"),
    "densefilter": fill("", "{{a|e}}"),
    "denseset": fill("", "{%set a#=b%}"),
    "densesets": fill("", "{%set a,b,c,d,e,f,g=b%}"),
    "ifs": fill(sets(2000), "{%if a%}{%endif%}"),
    "ifs1": fill(sets(1000), "{%if a%}{%endif%}"),
    "ifs3": fill(sets(1200), "{%if a%}{%elif a%}{%elif a%}{%elif a%}{%elif a%}{%endif%}"),
    "fors": fill(sets(2000), "{%for a in b%}{%endfor%}"),
    "calls": fill(sets(2000), "{%call f()%}{%endcall%}"),
    "filterb": fill(sets(2000), "{%filter e%}{%endfilter%}"),
    "forsets": fill("", "{%for a in b%}{%set a#=1%}{%endfor%}"),
    "ifset": fill("", "{%if b%}{%set a#=1%}{%endif%}"),
    "ifsetu": fill("", "{%if b%}{{a#}}{%endif%}"),
    "elifs": fill("{% if a %}", "{%elif a%}", "{% endif %}"),
    "cmps": fill("{{ a ", "<a", " }}"),
    "concat": fill("{{ a", "~a", " }}"),
    "list again": fill("{{ [", "a,", "] }}"),
    "dict": fill("{{ {", "a:a,", "} }}"),
    "dict1": fill("{{ {", "1:1,", "} }}"),
    "list1": fill("{{ [", "1,", "] }}"),
    "call": fill("{{ f(", "a,", ") }}"),
    "kw": fill("{{ f(", "a#=1,", "b=1) }}"),
    "mkw": fill("{% macro f(", "a#=1,", "b=1) %}{% endmacro %}"),
    "consts": fill("{{ [", "'',", "] }}"),
    "lstrip": fill("", " {%set a=1%}"),
    "lines": fill("", "\n{{a}}"),
    "minus": fill("", "{{-a-}}"),
    "nestnames": fill("", "{%if a%}{%set x#=1%}" * 60 + "{%endif%}" * 60),
    "nestnames2": fill(sets(1500), "{%if a%}" * 80 + "{%endif%}" * 80),
    "nestcall": fill("", "{%call f()%}{%set x#=1%}" * 60 + "{%endcall%}" * 60),
    "varargs": (
        "{% set ns=namespace(x=1) %}{% macro f() %}{% set ns.x=varargs %}{% endmacro %}"
        "{% for i in range(60) %}{% set y=f(ns.x,ns.x) %}{% endfor %}{{ ns.x }}"
    ),
    "kwargs": (
        "{% set ns=namespace(x=1) %}{% macro f() %}{% set ns.x=kwargs %}{% endmacro %}"
        "{% for i in range(60) %}{% set y=f(a=ns.x,b=ns.x) %}{% endfor %}{{ ns.x }}"
    ),
    "cycler items": (
        "{% set ns=namespace(x=1) %}{% for i in range(60) %}{% set ns.x=cycler(ns.x,ns.x).items %}{% endfor %}"
    ),
    "html": (
        "{% set ns=namespace(x='<<<<<<<<<<<<<<<<'|safe) %}{% for i in range(60) %}{% set ns.x=ns.x+ns.x %}{% endfor %}"
    ),
    "html of texts": "{% set x='a'*100000 %}{{ (x|safe) + '<'*4000000 }}",
    "html joined": "{% set x=('a'*1000000)|safe %}{{ x.join(['b']*100000)|length }}",
    "html replaced": "{% set x=('a'*1000000)|safe %}{{ x.replace('a', x)|length }}",
    "text of filters": "{{ (['\U000e0001'*4000000]|string)|title|title|title|length }}",
    "dictionaries of long keys": (
        "{% set ns=namespace(d={}, x='a'*4000000) %}{% for i in range(1000) %}"
        "{% set ns.d=dict(ns.d, **{ns.x~i: 1}) %}{% endfor %}{{ ns.d }}"
    ),
    "number by number": "{% set ns=namespace(x=1) %}{% for i in range(100000) %}{% set ns.x=ns.x+ns.x %}{% endfor %}",
    "number by difference": (
        "{% set ns=namespace(x=-1) %}{% for i in range(100000) %}{% set ns.x=ns.x-(0-ns.x) %}{% endfor %}"
    ),
    "filter in a filter": "{% for i in range(100000) %}{% filter upper %}{{ 'a'*100000 }}{% endfilter %}{% endfor %}",
}

# For what is harmless, or fails by itself.
ODD: Final = {
    "append named": "{{ [].append }}{{ [].pop }}{{ []|attr('append') }}{{ [[]]|map(attribute='append')|list }}",
    "append wrong": "{{ [].append() }}",
    "pop of nothing": "{{ [].pop() }}",
    "append and pop": "{% set l=[1] %}{% for x in l %}{% set _=l.append(l.pop(0)) %}{% endfor %}",
    "append to a tuple": "{{ ().append(1) }}",
    # As much as the limits allow: whether there is time for that depends on the machine.
    "sortlower": "{{ (('ab'*131000)|list)|sort|length }}",
    "sortlist": "{{ (range(100000)|map('string')|list)|sort|length }}",
    "dictsort": "{{ dict(range(100000)|map('string')|batch(2))|dictsort|length }}",
    "uniq": "{{ (range(100000)|map('string')|list)|unique|list|length }}",
    "minmax": "{{ (range(100000)|list)|map('abs')|max }}",
    "cycler": "{% set c=cycler(*range(100000)) %}{% for i in range(100000) %}{{ c.next() }}{% endfor %}",
    "looplen": "{% for i in range(100000)|map('string') %}{{ loop.length }}{% endfor %}",
    "nestfor": fill("", "{%for a in b%}" * 15 + "{%endfor%}" * 15),
    "fmtmap": "{{ '{a.__class__}'.format_map({'a': range}) }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "map attr": "{{ [1]|map(attribute='__class__')|list }}",
    "recurse": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(60) }}",
    "batch": "{{ [1]|batch(100000, 'x')|list }}{{ [1]|slice(100000)|list|length }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deepblock": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "syntax": "{% for %}",
    "constfold": "{{ 'a' * 1000000000 if false else 'b' }}",
    "recloop": "{% for x in [1] recursive %}{{ loop([1,2]) }}{% endfor %}",
    "filesize": "{{ 10**18|filesizeformat }}",
    "ns repr": (
        "{% set ns=namespace(x=1) %}{% for i in range(60) %}"
        "{% set ns.x=namespace(a=ns.x,b=ns.x) %}{% endfor %}{{ ns.x }}"
    ),
    "maps": "{{ range(100000)" + "|map('string')" * 200 + "|list|length }}",
    "mapattr": "{{ range(100000)" + "|map(attribute='real')" * 1000 + "|list|length }}",
    "rejects": "{{ range(100000)" + "|reject('none')" * 2000 + "|list|length }}",
    "int": "{{ ('9'*4000000)|int }}",
    "float": "{{ ('9'*4000000)|float }}",
    "int36": "{{ ('z'*4000000)|int(base=36) }}",
    "striptags2": "{{ (('<!---->'*590000)|safe).striptags() }}",
    "catalan": "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "wide title": "{{ ('𐐀'*4000000)|title|length }}",
    "wordcount": "{{ ('a '*2000000)|wordcount }}",
    "groupby again": "{{ range(100000)|map('list')|list }}",
    "selecteq": "{% set l=range(100000)|list %}{{ ([l]*2)|select('eq', l)|list|length }}",
    "random": "{{ (range(100000)|list)|random }}",
    "round": "{{ 1.5|round(99999,'ceil') }}",
    "round2": "{{ 3|round(-99999,'floor') }}",
    "trimchars": "{{ ('ab'*2000000)|trim('ab'*2000000) }}",
    "keysminus": "{% set d=dict.fromkeys(range(100000)|list) %}",
    "stack": "{% macro f() %}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 90 + "{% endcall %}" * 90,
    "gen2": "{{ (range(9)|map('string')).gi_code }}",
    "gen3": "{{ (range(9)|map('string')).send }}",
    "ctx": "{{ self._TemplateReference__context }}",
    "ctx2": "{{ self|attr('_TemplateReference__context') }}",
    "fmtpriv": "{{ '{0._marks}'.format('a') }}",
    "fmt via map": "{{ ['{0.__globals__}']|map('format', raise_exception)|list }}",
    "bound fmt": "{% set f='{0.__globals__}'.format %}{{ f(strftime_now) }}",
    "attr fmt": "{{ ('{0.__globals__}'|attr('format'))(strftime_now) }}",
    "item fmt": "{{ '{0.__globals__}'['format'](strftime_now) }}",
    "map fmt2": "{{ ['{0.__globals__}'.format]|map('string')|list }}",
    "strclass": "{{ ''.join.__self__.__class__ }}",
    "dictattr": "{{ dict.__base__ }}",
    "loopattr": "{% for i in [1] %}{{ loop._iterable }}{{ loop.__init__ }}{% endfor %}",
    "env": "{{ environment }}{{ context }}{{ resolve }}",
    "undef": "{% for i in range(100000) %}{{ x.y.z }}{% endfor %}",
    "minustext": "{{ 'a' - 1 }}",
    "raise": "{{ raise_exception('x'*4000000) }}",
    "raisenl": "{{ raise_exception('a\\nb\\x1b[31m') }}",
    "keyerr": "{% set x='a'*4000000 %}{{ [1]|sum(attribute=x) }}",
    "macros": fill(sets(2000), "{%macro f()%}{%endmacro%}"),
    "withs": fill(sets(2000), "{%with%}{%endwith%}"),
    "macuse": fill("", "{%macro f#()%}{{f#}}{%endmacro%}"),
    "ands": fill("{{ a ", "and a ", " }}"),
    "notnot": fill("{{ ", "not ", "a }}"),
    "dots": fill("{{ a", ".a", " }}"),
    "filters": fill("{{ a", "|e", " }}"),
    "neg": fill("{{ ", "-", "1 }}"),
    "tern": fill("{{ ", "a if a else ", "a }}"),
    "chars": fill("{{ '", "a", "' }}"),
    "num": fill("{{ ", "1", " }}"),
    "num_": fill("{{ ", "1_1", " }}"),
    "hexnum": fill("{{ 0x", "f", " }}"),
    "flt": fill("{{ 1e", "9", " }}"),
    "lbr": fill("{{ ", "[", " }}"),
    "strs": fill("{{ ", "''", " }}"),
    "comments": fill("", "{#"),
    "raws": fill("", "{% raw %}"),
    "ws": fill("{%", " "),
    "ws2": fill("{{ a ", "\n", " }}"),
    "nest50": fill("", "{%if a%}" * 50 + "{%endif%}" * 50),
    "braces": fill("", "{"),
    "opens": fill("", "{{ "),
    "dd": fill("", "{%-if a-%}{%-endif-%}"),
    "nestmac": fill(sets(1500), "{%macro f()%}" * 15 + "{%endmacro%}" * 15),
    "loopcomp": fill("", "{%for a in b if a recursive%}{{loop}}{%else%}{%endfor%}"),
}
