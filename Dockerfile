# The image of head and slices of a Ray cluster on TPU hosts; `ray start` comes from KubeRay or from you.
# Every package is pinned with its hash in lock/image.txt (`make lock`).
FROM python:3.12-slim-bookworm

# libnuma: vLLM asks for it at import. Debian keeps no old versions that could be named.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --user-group --create-home --shell /usr/sbin/nologin serving

WORKDIR /app
COPY lock/image.txt lock/image.txt
# torch and torchvision are builds that only PyTorch's CPU index has; all that either index serves is held to its hash.
RUN pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
    --extra-index-url https://download.pytorch.org/whl/cpu --requirement lock/image.txt

COPY pyproject.toml README.md ./
COPY serving serving
COPY deployments deployments
# The lock has setuptools: nothing is fetched here.
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# A TPU host stages weights on its CPU devices: "tpu" alone would hide them.
# serving-haproxy: HAProxy without splicing, which overlooks clients that hang up (serving/router/haproxy.py).
# Serve starts it anew after three failed checks. With its own 10 s between them a door that died stayed shut for half a minute.
ENV JAX_PLATFORMS=tpu,cpu \
    RAY_SERVE_HAPROXY_BINARY_PATH=/usr/local/bin/serving-haproxy \
    RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1

USER 1000:1000
