{{/* Names and labels. Release names may be 53 long; KubeRay appends up to 28 characters to a RayService's name
(hash, group, suffixes of Services and pods), so the name is at most 35, and a cut one ends in a hash of the whole. */}}
{{- define "expertmesh.fit" -}}
{{- if gt (len .) 35 -}}
{{- printf "%s-%s" (trunc 28 . | trimSuffix "-") (sha256sum . | trunc 6) -}}
{{- else -}}
{{- trimSuffix "-" . -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "expertmesh.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $own := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- include "expertmesh.fit" (default $own .Values.fullnameOverride) -}}
{{- end -}}

{{- define "expertmesh.serviceAccountName" -}}
{{- $default := .Values.serviceAccount.create | ternary (include "expertmesh.fullname" .) "default" -}}
{{- default $default .Values.serviceAccount.name -}}
{{- end -}}

{{- define "expertmesh.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.selectorLabels" -}}
app.kubernetes.io/name: {{ include "expertmesh.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "expertmesh.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" (include "expertmesh.name" .)
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/part-of" "expertmesh"
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63)
-}}
{{- mergeOverwrite (deepCopy (default dict .Values.commonLabels)) $own | toYaml -}}
{{- end -}}

{{/* metadata of an object: dict "root" $ "name" (optional) "component" (optional) "labels" "annotations" (optional) */}}
{{- define "expertmesh.metadata" -}}
{{- $root := .root -}}
name: {{ default (include "expertmesh.fullname" $root) .name }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "expertmesh.labels" $root | nindent 2 }}
  {{- with .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) (default dict $root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Secrets that exist already, or that the chart makes. */}}
{{- define "expertmesh.keysSecret" -}}
{{- if .Values.auth.existingSecret -}}
{{ .Values.auth.existingSecret }}
{{- else if .Values.auth.keys -}}
{{ include "expertmesh.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "expertmesh.adminSecret" -}}
{{- with .Values.auth.adminToken -}}
{{- if .existingSecret -}}
{{ .existingSecret }}
{{- else if .value -}}
{{ include "expertmesh.fullname" $ }}-admin
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Kubernetes quantity of memory in bytes. */}}
{{- define "expertmesh.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+" $text | float64 -}}
{{- $powers := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf $number (get $powers (regexFind "[A-Za-z]*$" $text)) | floor | int64 -}}
{{- end -}}
