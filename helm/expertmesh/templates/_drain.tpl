{{/* preStop of a front door. Its endpoint is removed at the same moment, but load balancers notice
that only after a while, so it goes on answering; then the open connections may end. */}}
{{- define "expertmesh.scripts" -}}
{{- range $name := list "drain.sh" "chat.py" }}
{{ $name }}: |
  {{- $.Files.Get (printf "files/%s" $name) | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "expertmesh.drainFile" -}}
/tmp/expertmesh-leaving
{{- end -}}

{{- define "expertmesh.drainSeconds" -}}
{{- add .Values.drain.endpointSeconds .Values.drain.seconds -}}
{{- end -}}

{{- define "expertmesh.frontDoorGrace" -}}
{{- $needed := .Values.drain.enabled | ternary (add (include "expertmesh.drainSeconds" .) 30) 30 -}}
{{- default $needed .Values.frontDoor.terminationGracePeriodSeconds -}}
{{- end -}}
