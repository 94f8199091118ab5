"""The scripts that run on hosts, as one content-addressed kit, and the line of Python that starts them there."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

ONHOST = Path(__file__).parent / "onhost"
MARK = "phasegate-agent"  # begins the first line of ours, after whatever a login script may print

# Runs before any file of ours is on the host: check the kit by its hash, receive it if it is missing or damaged, start it.
BOOT = """
import hashlib,json,os,sys
root,digest=sys.argv[1:3]
base=os.path.join(os.path.abspath(root),'bin')
kit=os.path.join(base,digest)
def good():
    try: files={n:open(os.path.join(kit,n)).read() for n in sorted(os.listdir(kit)) if n.endswith('.py')}
    except OSError: return False
    return hashlib.sha256(json.dumps(files,sort_keys=True).encode()).hexdigest()==digest
have,rest=good(),b''
os.write(1,('%s %s\\n'%('MARK','have' if have else 'need')).encode())
if not have:
    while b'\\n' not in rest:
        part=os.read(0,1<<16)
        if not part: sys.exit(0)
        rest+=part
    line,_,rest=rest.partition(b'\\n')
    os.makedirs(base,exist_ok=True)
    new='%s.%d.new'%(kit,os.getpid())
    os.mkdir(new)
    for n,text in json.loads(line).items():
        with open(os.path.join(new,n),'w') as f: f.write(text); f.flush(); os.fsync(f.fileno())
    for _ in range(9):
        try: os.rename(new,kit)
        except OSError:
            if good(): break
            try: os.rename(kit,new+'.damaged')
            except OSError: pass
        else: break
    link=os.path.join(base,'kit'); temporary='%s.%d'%(link,os.getpid())
    os.symlink(digest,temporary); os.replace(temporary,link)
sys.path.insert(0,kit)
import agent
agent.serve(root,float(sys.argv[3]),rest)
""".replace("MARK", MARK)


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


def script(root: str, name: str) -> str:
    """Path on the host of one of the kit's scripts, for service units and argv that outlive this version."""
    return f"{root.rstrip('/')}/bin/kit/{name}"
