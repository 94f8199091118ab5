# The controller: `phase` as it operates (status, review, plan, run on ssh fleets, watch, rollback, report), without torch.
#
#   docker build -t phasegate .
#   docker run --rm -it -v "$PWD:/work" -v "$HOME/.ssh:/home/phase/.ssh:ro" -v "$HOME/.gitconfig:/home/phase/.gitconfig:ro" phasegate status
#
# With Phase 1 and charts inside (a compiler and about 1 GB more): docker build --build-arg EXTRAS='[bench]' -t phasegate:bench .
FROM python:3.13-slim AS wheel
COPY pyproject.toml README.md LICENSE /src/
COPY phases /src/phases
RUN pip wheel --no-cache-dir --no-deps -w /wheels /src

FROM python:3.13-slim
ARG EXTRAS=""
RUN apt-get update \
 && apt-get install -y --no-install-recommends git openssh-client $(test -z "$EXTRAS" || echo g++) \
 && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "phasegate$EXTRAS @ file://$(ls /wheels/phasegate-*.whl)" && rm -r /wheels
# Nothing here needs root. The repository is mounted at /work and may belong to another uid: git is told that this is meant.
RUN useradd --create-home phase && git config --system --add safe.directory '*'
USER phase
WORKDIR /work
ENTRYPOINT ["phase"]
