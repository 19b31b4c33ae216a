{{/* `ray start` of a group: dict "root" "group" "own" (parameters) "offers" (custom resources, whole numbers).
KubeRay puts the values into a shell command, hence the inner quotes. */}}
{{- define "expertmesh.rayStart" -}}
{{- $own := merge .own (dict
  "object-store-memory" (.root.Values.objectStoreBytes | int64 | toString)
  "metrics-export-port" "8080"
  "dashboard-agent-listen-port" "52365"
  "disable-usage-stats" "true"
  "resources" (printf "'%s'" (toJson .offers))
) -}}
{{- range $key := keys (default dict .group.rayStartParams) | sortAlpha -}}
{{- if hasKey $own $key -}}
{{- fail (printf "rayStartParams.%s is decided by other values of this chart" $key) -}}
{{- end -}}
{{- end -}}
rayStartParams:
  {{- merge $own (default dict .group.rayStartParams) | toYaml | nindent 2 }}
{{- end -}}
