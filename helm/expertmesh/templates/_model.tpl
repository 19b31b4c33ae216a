{{/* The volume that holds the checkpoint, and how it gets there. */}}
{{- define "expertmesh.modelVolume" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "pvc" -}}
persistentVolumeClaim:
  claimName: {{ default (printf "%s-model" (include "expertmesh.fullname" .)) $m.pvc.existingClaim }}
  # Disks that many nodes read are attached read-only, and then have to be mounted so.
  readOnly: true
{{- else if eq $m.source "hostPath" -}}
hostPath: {path: {{ $m.hostPath.path | quote }}, type: Directory}
{{- else if eq $m.objectStore.cache.type "hostPath" -}}
hostPath: {path: {{ $m.objectStore.cache.hostPath | quote }}, type: DirectoryOrCreate}
{{- else if eq $m.objectStore.cache.type "ephemeral" -}}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      {{- include "expertmesh.storageClass" $m.objectStore.cache.storageClass | nindent 6 }}
      resources: {requests: {storage: {{ $m.objectStore.cache.size | quote }}}}
{{- else -}}
emptyDir: {sizeLimit: {{ $m.objectStore.cache.size | quote }}}
{{- end -}}
{{- end -}}

{{/* Left out, it is the cluster's default; "-" asks for none. */}}
{{- define "expertmesh.storageClass" -}}
{{- if eq . "-" -}}
storageClassName: ""
{{- else if . -}}
storageClassName: {{ . | quote }}
{{- end -}}
{{- end -}}

{{/* Init containers that bring the checkpoint: a list of one, or empty. dict "root" $ "part" "all" or "config" */}}
{{- define "expertmesh.fetch" -}}
{{- $root := .root -}}
{{- $part := .part -}}
{{- $m := $root.Values.model -}}
{{- if eq $m.source "objectStore" -}}
{{- with $m.objectStore -}}
- name: fetch-model
  image: {{ .image | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command:
    {{- toYaml .command | nindent 4 }}
  args:
    {{- toYaml .args | nindent 4 }}
  env:
    - {name: MODEL_URI, value: {{ .uri | quote }}}
    - {name: MODEL_PATH, value: {{ include "expertmesh.modelPath" $root | quote }}}
    - {name: MODEL_PART, value: {{ $part }}}
    - {name: HOME, value: /tmp}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .secretName }}
  envFrom:
    - secretRef: {name: {{ . | quote }}}
  {{- end }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: {{ $m.mountPath | quote }}}
{{- end -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}
