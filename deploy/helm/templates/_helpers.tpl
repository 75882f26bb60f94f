{{- define "tercet.name" -}}
{{- printf "%s-%s" .Release.Name .part | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tercet.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tercet.selector" -}}
{{ include "tercet.labels" . }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "tercet.metadata" -}}
name: {{ include "tercet.name" . }}
labels:
  {{- include "tercet.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tercet.replicas" -}}
{{- if not (and (eq .part "scheduler") (ne .Values.autoscaling.type "none")) }}
replicas: {{ (index .Values .part).replicas }}
{{- end }}
{{- end }}

{{- /* Image of a part. */}}
{{- define "tercet.image" -}}
{{- $gpus := and (eq .part "scheduler") (gt (int .Values.scheduler.gpus) 0) -}}
{{- $tag := .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" $gpus)) -}}
{{ .Values.image.registry }}tercet-{{ .part }}:{{ $tag }}
{{- end }}

{{- /* Pod of a part: everything except the container's command, ports, probes, resources and volumes of its own. */}}
{{- define "tercet.pod" -}}
{{- $own := index .Values .part }}
automountServiceAccountToken: false
enableServiceLinks: false
# Longer than a part needs to finish its requests after SIGTERM.
terminationGracePeriodSeconds: 45
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tercet.selector" . | nindent 8 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $own $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tercet.container" -}}
name: {{ .part }}
image: {{ include "tercet.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "tercet.args" -}}
- --peer=$(POD_NAME)
- --listen=tcp://0.0.0.0:{{ .port }}
- --keys=/keys
{{- with (index .Values .part).args }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tercet.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- with (index .Values .part).env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tercet.mounts" -}}
- {name: keys, mountPath: /keys, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "tercet.volumes" -}}
- name: keys
  secret: {secretName: {{ index .Values.secrets (printf "%sKeys" .part) }}, defaultMode: 0440}
- name: tmp
  emptyDir: {}
{{- end }}

{{- /* Probes by the part's own command. */}}
{{- define "tercet.probes" -}}
{{- $probe := printf "tercet-%s, probe, --listen, \"tcp://127.0.0.1:%d\", --keys, /keys" .part (int .port) }}
startupProbe:
  exec:
    command: [{{ $probe }}, --live]
  timeoutSeconds: 5
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  exec:
    command: [{{ $probe }}]
  timeoutSeconds: 5
  periodSeconds: 5
livenessProbe:
  exec:
    command: [{{ $probe }}, --live]
  timeoutSeconds: 5
  periodSeconds: 10
{{- end }}

{{- /* Headless Service and disruption budget of a part. */}}
{{- define "tercet.peers" -}}
---
# Headless: the name resolves to every pod, also to pods still loading. Frontends connect to each of them.
apiVersion: v1
kind: Service
metadata:
  {{- include "tercet.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "tercet.selector" . | nindent 4 }}
  ports:
    - {name: inbox, port: {{ .port }}}
{{ include "tercet.budget" . }}
{{- end }}

{{- define "tercet.budget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tercet.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "tercet.selector" . | nindent 6 }}
{{- end }}

{{- define "tercet.template-metadata" -}}
labels:
  {{- include "tercet.selector" . | nindent 2 }}
{{- with (index .Values .part).podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
