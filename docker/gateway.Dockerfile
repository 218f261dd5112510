# The gateway alone: HTTP and scheduling, no torch. Build from the repository's root:
#   docker build -f docker/gateway.Dockerfile -t cellgate-gateway .
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gateway gateway
COPY trainer_cell trainer_cell
RUN pip install --no-cache-dir -c constraints.txt .

# Whatever brings torch into this image is a mistake, and found here.
RUN if python -c 'import torch' 2>/dev/null; then echo 'torch is in the gateway image' >&2; exit 1; fi \
    && python -c 'import gateway.assembly, gateway.cli'

# The same user in both images: the socket's directory is open to that user alone, and checkpoints are shared.
RUN useradd --uid 10001 --create-home cellgate \
    && install -d -o cellgate -g cellgate -m 0700 /var/lib/cellgate /run/cellgate \
    && install -d -o cellgate -g cellgate /var/lib/cellgate-checkpoints
USER cellgate
WORKDIR /home/cellgate

ENV PYTHONUNBUFFERED=1 \
    CELLGATE_HOST=0.0.0.0 \
    CELLGATE_STATE=/var/lib/cellgate \
    CELLGATE_CHECKPOINTS=/var/lib/cellgate-checkpoints \
    CELLGATE_GATEWAY_SOCKET=/run/cellgate/cell.sock
VOLUME ["/var/lib/cellgate", "/var/lib/cellgate-checkpoints", "/run/cellgate"]
EXPOSE 8787
HEALTHCHECK --interval=5s --start-period=10s \
    CMD python -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8787/healthz", timeout=3)'
ENTRYPOINT ["cellgate", "gateway"]
