"""The README at the root of the ledger branch, for whoever looks at it without the toolkit."""

LEDGER_README = b"""# Checkpoints

Each directory under `checkpoints/` is one gate of one phase: `<number>-<phase>-<verdict>`.

    SHA256SUMS               check with `sha256sum -c SHA256SUMS` inside the directory
    manifest.json            what ran, on what, from which source; sha256 of every other file
    results.json             every case with all its samples
    gate.json                the verdict rule by rule: estimate, interval, n, threshold
    *.txt, *.png             the same for people
    provenance.intoto.json   in-toto statement (SLSA provenance v1)

The digest of a checkpoint is the sha256 of its manifest.json. The commit that added it has the previous entry as its
first parent and the source it speaks of as its second; an annotated tag names its digest.
`approvals/<number>/` holds who said yes or no to which digest, and why; an annotated tag names the digest of each.
"""
