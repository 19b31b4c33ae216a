{{/* The pod template that all groups share.
dict "root" $ "component" "attention" "group" .Values.attention "gpus" 8 "rdma" true "extra" (dict ...)
What a group sets is added to what is set for all pods; affinity and the like replace it. */}}
{{- define "expertmesh.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $group := .group -}}
metadata:
  labels:
    # Without the chart's version: an upgrade that changes nothing else keeps the pods.
    {{- include "expertmesh.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with mergeOverwrite (deepCopy (default dict $v.commonLabels)) (default dict $v.podLabels) (default dict $group.podLabels) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Pods of a new configuration are new pods, and with upgrade.strategy NewCluster a new cluster.
    checksum/config: {{ include "expertmesh.checksum" $root }}
    {{- with mergeOverwrite (deepCopy (default dict $v.podAnnotations)) (default dict $group.podAnnotations) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ include "expertmesh.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and $v.autoscaling.enabled (eq .component "head") }}
  enableServiceLinks: false
  {{- with default $v.priorityClassName $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with default $v.runtimeClassName $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- with mergeOverwrite (deepCopy (default dict $v.nodeSelector)) (default dict $group.nodeSelector) }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat (default list $v.tolerations) (default list $group.tolerations) }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with default $v.affinity $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with default $v.topologySpreadConstraints $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ .grace | int64 }}
  {{- $inits := concat (default list $v.extraInitContainers) (include "expertmesh.fetch" (dict "root" $root "part" (has .component (list "attention" "experts") | ternary "all" "config")) | fromYamlArray) }}
  {{- with $inits }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    # Ray's container has to be the first.
    - name: ray-{{ .component }}
      image: {{ include "expertmesh.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      ports:
        {{- toYaml .ports | nindent 8 }}
      env:
        {{- include "expertmesh.env" $root | nindent 8 }}
        {{- if eq .component "attention" }}
        {{- with include "expertmesh.stateEnv" $root }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with concat (default list $v.extraEnv) (default list $group.extraEnv) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $v.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- include "expertmesh.resources" . | nindent 8 }}
      securityContext:
        {{- include "expertmesh.containerSecurity" . | nindent 8 }}
      {{- toYaml .probes | nindent 6 }}
      {{- with .lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: scripts, mountPath: /etc/expertmesh/scripts, readOnly: true}
        {{- if include "expertmesh.keysSecret" $root }}
        - {name: api-keys, mountPath: /etc/expertmesh/auth, readOnly: true}
        {{- end }}
        {{- if ne $v.model.source "bundled" }}
        - {name: model, mountPath: {{ $v.model.mountPath | quote }}, readOnly: true}
        {{- end }}
        {{- if and (eq .component "attention") (ne $v.state.disk.type "none") }}
        - {name: state, mountPath: {{ $v.state.disk.mountPath | quote }}}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $v.scratchSize | quote }}}
    # The default of 64 MiB is too small for Ray's object store and for NCCL.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $group.shmSize | quote }}}
    - name: scripts
      configMap: {name: {{ include "expertmesh.fullname" $root }}-scripts, defaultMode: 0555}
    {{- with include "expertmesh.keysSecret" $root }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        items: [{key: {{ $v.auth.existingSecretKey | quote }}, path: keys}]
    {{- end }}
    {{- if ne $v.model.source "bundled" }}
    - name: model
      {{- include "expertmesh.modelVolume" $root | nindent 6 }}
    {{- end }}
    {{- if and (eq .component "attention") (ne $v.state.disk.type "none") }}
    - name: state
      {{- include "expertmesh.stateVolume" $root | nindent 6 }}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Requests equal limits. The group's own sizes, its GPUs, and RDMA devices where it has some. */}}
{{- define "expertmesh.resources" -}}
{{- $sizes := deepCopy .group.resources -}}
{{- if .gpus -}}{{- $_ := set $sizes .group.gpuResourceName .gpus -}}{{- end -}}
{{- if .rdma -}}{{- $sizes = merge $sizes (default dict .root.Values.rdma.resources) -}}{{- end -}}
{{- dict "requests" $sizes "limits" $sizes | toYaml -}}
{{- end -}}

{{- define "expertmesh.containerSecurity" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if and .rdma .root.Values.rdma.enabled -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $add := append (default list $capabilities.add) "IPC_LOCK" | uniq -}}
{{- $_ := set $context "capabilities" (mergeOverwrite $capabilities (dict "add" $add)) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "expertmesh.env" -}}
# Nothing but /tmp and /dev/shm can be written to.
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /tmp/.cache}
- {name: MPLCONFIGDIR, value: /tmp/.matplotlib}
- {name: TRITON_CACHE_DIR, value: /tmp/.triton}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Ray gives its workers niceness 15: anything else on the node would starve the model.
- {name: RAY_worker_niceness, value: "0"}
{{- with include "expertmesh.adminSecret" . }}
- name: EXPERTMESH_ADMIN_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.auth.adminToken.existingSecretKey | quote }}}
{{- end }}
{{- end -}}

{{/* What restarts pods when it changes: the served configuration, the scripts and the admin token.
API keys are not among it: the server reads them again by itself. */}}
{{- define "expertmesh.checksum" -}}
{{- list (include "expertmesh.serveConfig" .) (include "expertmesh.scripts" .) .Values.auth.adminToken.value | toJson | sha256sum -}}
{{- end -}}

{{/* Ray's agent answers for the raylet, and on the head for the GCS too. Loading happens in processes
of their own, so it never looks like a hang. */}}
{{- define "expertmesh.rayProbes" -}}
{{- include "expertmesh.probes" (dict "root" . "live" (dict "path" "/api/healthz" "port" "agent") "ready" (dict "path" "/api/healthz" "port" "agent")) -}}
{{- end -}}

{{- define "expertmesh.probes" -}}
{{- $p := .root.Values.probes -}}
startupProbe:
  httpGet:
    {{- toYaml .live | nindent 4 }}
  periodSeconds: {{ $p.startup.periodSeconds | int64 }}
  timeoutSeconds: {{ $p.startup.timeoutSeconds | int64 }}
  failureThreshold: {{ divf $p.startup.budgetSeconds $p.startup.periodSeconds | ceil | int64 }}
livenessProbe:
  httpGet:
    {{- toYaml .live | nindent 4 }}
  periodSeconds: {{ $p.liveness.periodSeconds | int64 }}
  timeoutSeconds: {{ $p.liveness.timeoutSeconds | int64 }}
  failureThreshold: {{ $p.liveness.failureThreshold | int64 }}
readinessProbe:
  httpGet:
    {{- toYaml .ready | nindent 4 }}
  periodSeconds: {{ $p.readiness.periodSeconds | int64 }}
  timeoutSeconds: {{ $p.readiness.timeoutSeconds | int64 }}
  failureThreshold: {{ $p.readiness.failureThreshold | int64 }}
{{- end -}}
