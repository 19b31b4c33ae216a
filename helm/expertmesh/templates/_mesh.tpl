{{/* How many actors there are, and what Ray Serve runs. */}}
{{- define "expertmesh.attentionActors" -}}
{{- mul .Values.attention.replicas .Values.attention.actorsPerPod -}}
{{- end -}}

{{- define "expertmesh.expertActors" -}}
{{- mul .Values.experts.replicas .Values.experts.actorsPerPod -}}
{{- end -}}

{{/* Folder of the checkpoint inside the pods; the image links the bundled one. */}}
{{- define "expertmesh.modelPath" -}}
{{- with .Values.model -}}
{{- if eq .source "bundled" -}}
/opt/expertmesh/models/nano
{{- else if .folder -}}
{{ trimSuffix "/" .mountPath }}/{{ trimPrefix "/" .folder | trimSuffix "/" }}
{{- else -}}
{{ .mountPath }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.autoscale" -}}
{{- $v := .Values -}}
{{- $auto := $v.autoscaling -}}
dry_run: {{ $auto.dryRun }}
attention:
  min_replicas: {{ mul $auto.attention.minReplicas $v.attention.actorsPerPod }}
  max_replicas: {{ mul $auto.attention.maxReplicas $v.attention.actorsPerPod }}
  {{- with $auto.attention.settings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if $v.experts.replicas }}
experts:
  min_actors: {{ mul $auto.experts.minReplicas $v.experts.actorsPerPod }}
  max_actors: {{ mul $auto.experts.maxReplicas $v.experts.actorsPerPod }}
  {{- with $auto.experts.settings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- else }}
experts: null
{{- end }}
{{- end -}}

{{/* ClusterSettings: what the values decide, over what `mesh` adds. */}}
{{- define "expertmesh.mesh" -}}
{{- $v := .Values -}}
load:
  model: {{ include "expertmesh.modelPath" . }}
  dtype: {{ $v.model.dtype }}
  device: {{ $v.model.device }}
  kernels: {{ $v.model.kernels | quote }}
  read_mode: {{ $v.model.readMode }}
attention_replicas: {{ include "expertmesh.attentionActors" . }}
expert_actors: {{ include "expertmesh.expertActors" . }}
{{- with $v.experts.slotsPerActor }}
slots_per_actor: {{ . | int64 }}
{{- end }}
# Pods bound the number of actors by these resources, so no CPU slots have to be counted out.
cpus_per_actor: 0.01
gpus_per_actor: {{ $v.attention.gpusPerActor }}
resources:
  control: {expertmesh_control: 0.01}
  front_door: {expertmesh_front_door: 1}
  attention: {expertmesh_attention: 1}
  experts: {expertmesh_expert: 1}
nodes_may_join: true
{{- if eq $v.model.source "objectStore" }}
# The head has no shards; the actors check theirs.
check_checkpoint: false
{{- end }}
placement_timeout_s: {{ $v.joinTimeoutSeconds | int64 }}
{{- if $v.autoscaling.enabled }}
autoscale:
  {{- include "expertmesh.autoscale" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "expertmesh.edge" -}}
{{- $v := .Values -}}
{{- if $v.drain.enabled }}
http:
  drain_file: {{ include "expertmesh.drainFile" . }}
{{- end }}
{{- if $v.grpc.enabled }}
grpc:
  host: 0.0.0.0
  port: {{ $v.grpc.port | int64 }}
{{- end }}
{{- if include "expertmesh.keysSecret" . }}
auth:
  keys_file: /etc/expertmesh/auth/keys
{{- end }}
{{- end -}}

{{- define "expertmesh.serveConfig" -}}
{{- $v := .Values -}}
{{- $state := dict "engine" (dict "state" (include "expertmesh.state" . | fromYaml)) -}}
{{- $mesh := mergeOverwrite (deepCopy (default dict $v.mesh)) (include "expertmesh.mesh" . | fromYaml) $state -}}
{{- $edge := mergeOverwrite (deepCopy (default dict $v.edge)) (include "expertmesh.edge" . | fromYaml) -}}
{{- $args := dict "served_model_name" $v.model.name "front_doors" (int64 $v.frontDoor.replicas) "mesh" $mesh -}}
{{- with $v.model.maxLength }}{{ $_ := set $args "max_model_len" (int64 .) }}{{ end -}}
{{- with $edge }}{{ $_ := set $args "edge" . }}{{ end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  # Longer than load balancers keep idle connections, or they reuse one that has just been closed.
  keep_alive_timeout_s: 620
applications:
  - name: expertmesh
    route_prefix: /
    import_path: expertmesh.deploy.serve_app:build_openai_app
    args:
      {{- toYaml $args | nindent 6 }}
{{- end -}}
