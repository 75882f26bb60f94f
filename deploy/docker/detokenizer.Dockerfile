# The detokenizer: token ids to text. No torch and no model: schedulers send it the tokenizer. Build from the root:
#     docker build --file deploy/docker/detokenizer.Dockerfile --tag tercet-detokenizer:0.1.0 .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/tercet
COPY constraints.txt ./
COPY packages/protocol packages/protocol
COPY packages/detokenizer packages/detokenizer
# The base image's pip installs into the environment. The same pins hold for build dependencies, which -c alone does
# not pin.
ENV PIP_PYTHON=/opt/tercet PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
# hf_xet downloads models, which only schedulers do.
RUN pip install --no-cache-dir -c constraints.txt packages/protocol packages/detokenizer \
    && pip uninstall --yes hf_xet

FROM python:3.12-slim-bookworm
RUN groupadd --gid 10001 tercet \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp tercet \
    && install --directory --owner=10001 --group=10001 --mode=0700 /keys
COPY --from=build /opt/tercet /opt/tercet
ENV PATH=/opt/tercet/bin:$PATH PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="tercet-detokenizer" org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /tmp
EXPOSE 30200
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
    CMD ["tercet-detokenizer", "probe", "--listen", "tcp://127.0.0.1:30200", "--keys", "/keys"]
ENTRYPOINT ["tercet-detokenizer"]
CMD ["--listen", "tcp://0.0.0.0:30200", "--keys", "/keys"]
