# The frontend: HTTP, tokenization, and the command `tercet`, including `tercet keys`. No torch. Build from the root:
#     docker build --file deploy/docker/frontend.Dockerfile --tag tercet-frontend:0.1.0 .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/tercet
COPY constraints.txt ./
COPY packages/protocol packages/protocol
COPY packages/frontend packages/frontend
# The base image's pip installs into the environment. The same pins hold for build dependencies, which -c alone does
# not pin.
ENV PIP_PYTHON=/opt/tercet PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
# hf_xet downloads models, which only schedulers do. Only audio and video need numpy. The packages for them, 80 MB and
# 180 MB, are kept with --build-arg AUDIO=1 and --build-arg VIDEO=1.
ARG AUDIO=""
ARG VIDEO=""
RUN pip install --no-cache-dir -c constraints.txt packages/protocol "packages/frontend[media${VIDEO:+,video}]" \
    && pip uninstall --yes hf_xet \
    && if [ -z "$AUDIO" ]; then pip uninstall --yes cffi pycparser soundfile soxr; fi \
    && if [ -z "$AUDIO$VIDEO" ]; then pip uninstall --yes numpy; fi

FROM python:3.12-slim-bookworm
RUN groupadd --gid 10001 tercet \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp tercet \
    && install --directory --owner=10001 --group=10001 --mode=0700 /keys /state
COPY --from=build /opt/tercet /opt/tercet
ENV PATH=/opt/tercet/bin:$PATH PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="tercet-frontend" org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /tmp
# 8000 is HTTP; 30000 is the inbox, which receives messages of schedulers and detokenizers.
EXPOSE 8000 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
    CMD ["tercet-frontend", "probe", "http://127.0.0.1:8000"]
ENTRYPOINT ["tercet-frontend"]
CMD ["--host", "0.0.0.0", "--port", "8000", "--listen", "tcp://0.0.0.0:30000", "--keys", "/keys", \
     "--scheduler", "tcp://scheduler:30100", "--detokenizer", "tcp://detokenizer:30200"]
