{{/* Cached state of prompts and sessions: StateSettings, and where attention pods keep it. */}}
{{- define "expertmesh.state" -}}
{{- $s := .Values.state -}}
prefix_cache: {{ $s.prefixCache }}
snapshots: {{ $s.snapshots | int64 }}
host_bytes: {{ include "expertmesh.bytes" $s.hostSize }}
codec: {{ $s.codec }}
kv_mode: {{ $s.mode }}
offload_bytes: {{ include "expertmesh.bytes" $s.offloadSize }}
{{- if ne $s.disk.type "none" }}
disk: {{ $s.disk.mountPath }}
disk_bytes: {{ include "expertmesh.stateDiskBytes" . }}
offload_disk_bytes: {{ include "expertmesh.bytes" $s.offloadDiskSize }}
{{- end }}
{{- end -}}

{{/* A volume of that size holds a little less, for its file system. */}}
{{- define "expertmesh.stateDiskBytes" -}}
{{- mulf (include "expertmesh.bytes" .Values.state.disk.size) (eq .Values.state.disk.type "ephemeral" | ternary 0.9 1.0) | floor | int64 -}}
{{- end -}}

{{/* With old pages of running requests, of each replica in the pod. */}}
{{- define "expertmesh.stateVolumeSize" -}}
{{- $old := include "expertmesh.bytes" .Values.state.offloadDiskSize | int64 | mul .Values.attention.actorsPerPod -}}
{{- if $old -}}
{{- include "expertmesh.bytes" .Values.state.disk.size | int64 | add $old -}}
{{- else -}}
{{- .Values.state.disk.size -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.stateVolume" -}}
{{- $disk := .Values.state.disk -}}
{{- if eq $disk.type "hostPath" -}}
hostPath: {path: {{ $disk.hostPath | quote }}, type: DirectoryOrCreate}
{{- else if eq $disk.type "claim" -}}
persistentVolumeClaim: {claimName: {{ $disk.existingClaim | quote }}}
{{- else -}}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      {{- include "expertmesh.storageClass" $disk.storageClass | nindent 6 }}
      resources: {requests: {storage: {{ include "expertmesh.stateVolumeSize" . | quote }}}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.stateEnv" -}}
{{- with .Values.state.encryption -}}
{{- if .existingSecret -}}
- name: EXPERTMESH_STATE_SECRET
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .existingSecretKey | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Values that each fit their type but not one another. */}}
{{- define "expertmesh.validateState" -}}
{{- $v := .Values -}}
{{- $disk := $v.state.disk -}}
{{- if and (eq $disk.type "hostPath") (not $disk.hostPath) }}
{{- fail "state.disk.type hostPath needs state.disk.hostPath" }}
{{- end }}
{{- if and (eq $disk.type "claim") (not $disk.existingClaim) }}
{{- fail "state.disk.type claim needs state.disk.existingClaim" }}
{{- end }}
{{- if ne $disk.type "none" }}
{{- if lt (include "expertmesh.stateDiskBytes" . | int64) 67108864 }}
{{- fail (printf "state.disk.size %v is too little: it takes at least 80Mi" $disk.size) }}
{{- end }}
{{- end }}
{{- if and (eq $disk.type "none") (include "expertmesh.bytes" $v.state.offloadDiskSize | int64) }}
{{- fail "state.offloadDiskSize needs state.disk" }}
{{- end }}
{{- if and $v.state.encryption.existingSecret (eq $disk.type "none") }}
{{- fail "state.encryption.existingSecret needs state.disk: nothing else is encrypted" }}
{{- end }}
{{- if and (has $v.state.codec (list "int8" "int4")) (eq $disk.type "none") (ne (include "expertmesh.bytes" $v.state.hostSize | int64) 0) }}
{{- fail (printf "state.codec %s needs state.disk: host memory would keep estimates, and nothing the exact bytes that a hit reads" $v.state.codec) }}
{{- end }}
{{- $memory := include "expertmesh.bytes" $v.attention.resources.memory | int64 }}
{{- $host := add (include "expertmesh.bytes" $v.state.hostSize) (include "expertmesh.bytes" $v.state.offloadSize) | mul $v.attention.actorsPerPod }}
{{- if ge (add $host (include "expertmesh.bytes" $v.attention.shmSize)) $memory }}
{{- fail (printf "state.hostSize %v and state.offloadSize %v, times attention.actorsPerPod %v, and attention.shmSize %v, must be below attention.resources.memory %v" $v.state.hostSize $v.state.offloadSize $v.attention.actorsPerPod $v.attention.shmSize $v.attention.resources.memory) }}
{{- end }}
{{- $own := include "expertmesh.state" . | fromYaml }}
{{- range $key := concat (keys $own) (list "disk" "disk_bytes" "offload_disk_bytes") | uniq | sortAlpha }}
{{- if hasKey (dig "engine" "state" dict (default dict $v.mesh)) $key }}
{{- fail (printf "mesh.engine.state.%s is decided by the state values" $key) }}
{{- end }}
{{- end }}
{{- end -}}
