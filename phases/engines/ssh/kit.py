"""The scripts that run on hosts, as one content-addressed kit, and the command line that starts them there."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

ONHOST = Path(__file__).parent / "onhost"
MARK = "phasegate-agent"
WORD = 900  # characters: csh takes words of up to 1023

# Runs before any file of ours is on the host: check the kit by its hash, receive it if it is missing or damaged, start it.
# What it says begins with the session's token, since login scripts print on the same stream. Where somebody has put a
# terminal between (a forced command, a recording bastion), the terminal must neither echo nor translate, and its hanging
# up must not end a batch half way. Python 2 has to get as far as saying that it is Python 2.
BOOT = """
import hashlib,json,os,sys
root,digest,token=a['root'],a['digest'],a['token']
def say(what): os.write(1,(token+json.dumps(what)+'\\n').encode())
def fail(code,message,hint,**facts): say({'results':[],'error':{'code':code,'message':message,'hint':hint,'facts':facts}}); sys.exit(3)
if sys.version_info<(3,8): fail('old_python','%s there is Python %d.%d'%((a['python'],)+tuple(sys.version_info[:2])),'Set `python` of this host to a Python 3.8 or newer.')
try: named=os.fsencode(root)==root.encode('utf-8')
except ValueError: named=False
if not named: fail('locale','the locale there has no UTF-8, and the root needs it','Set LANG=C.UTF-8 for this user there, or a root of ASCII letters.')
if os.isatty(0) or os.isatty(1):
    import signal,tty
    signal.signal(signal.SIGHUP,signal.SIG_IGN)
    for fd in (0,1):
        if os.isatty(fd): tty.setraw(fd)
base=os.path.join(os.path.abspath(root),'bin')
kit=os.path.join(base,digest)
def good():
    try: files={n:open(os.path.join(kit,n),encoding='utf-8').read() for n in sorted(os.listdir(kit)) if n.endswith('.py')}
    except (OSError,ValueError): return False
    return hashlib.sha256(json.dumps(files,sort_keys=True).encode()).hexdigest()==digest
have,rest=good(),b''
say('have' if have else 'need')
def install(files):
    os.makedirs(base,exist_ok=True)
    new='%s.%d.new'%(kit,os.getpid())
    os.mkdir(new)
    for n,text in files.items():
        with open(os.path.join(new,n),'w',encoding='utf-8') as f: f.write(text); f.flush(); os.fsync(f.fileno())
    for _ in range(9):
        try: os.rename(new,kit)
        except OSError:
            if good(): break
            try: os.rename(kit,new+'.damaged')
            except OSError: pass
        else: break
    link=os.path.join(base,'kit'); temporary='%s.%d'%(link,os.getpid())
    os.symlink(digest,temporary); os.replace(temporary,link)
if not have:
    while b'\\n' not in rest:
        part=os.read(0,1<<16)
        if not part: sys.exit(0)
        rest+=part
    line,_,rest=rest.partition(b'\\n')
    try: install(json.loads(line))
    except OSError as e: fail('os',str(e.strerror),'',errno=e.errno,path=e.filename or base)
sys.path.insert(0,kit)
import agent
agent.serve(root,token,a['idle'],rest)
"""

# What a login shell gets to read: no line break, no quote but the pair around it, nothing that any shell expands; the rest
# is in words of letters and digits. csh, fish and the shells of the Bourne family read it alike. Nothing is imported from
# the directory that one logs in to.
STARTER = 'import sys;sys.path=[p for p in sys.path if p];import base64,json;a=json.loads(base64.urlsafe_b64decode("".join(sys.argv[1:])).decode());exec(a["boot"],{"a":a})'


@dataclass(frozen=True)
class Kit:
    digest: str
    line: bytes  # {file name: text} as one JSON line


@functools.cache
def kit() -> Kit:
    """The kit of this version of the toolkit."""
    files = {path.name: path.read_text() for path in sorted(ONHOST.glob("*.py"))}
    text = json.dumps(files, sort_keys=True)
    return Kit(hashlib.sha256(text.encode()).hexdigest(), text.encode() + b"\n")


def boot(python: str, root: str, token: str, idle: float) -> list[str]:
    """The argv that starts the agent; everything it says on standard output begins with `token`, a line each."""
    given = {"boot": BOOT, "python": python, "root": root, "digest": kit().digest, "token": token, "idle": idle}
    text = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    words = [text[start : start + WORD] for start in range(0, len(text), WORD)]
    return [python, "-E", "-s", "-S", "-c", STARTER, *words]


def script(root: str, name: str) -> str:
    """Path on the host of one of the kit's scripts, for service units and argv that outlive this version."""
    return f"{root.rstrip('/')}/bin/kit/{name}"
