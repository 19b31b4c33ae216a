{{/* Values that each fit their type but not one another. values.schema.json has looked at the types before. */}}
{{- define "expertmesh.validate" -}}
{{- $v := .Values -}}
{{- $experts := include "expertmesh.expertActors" . | int64 -}}
{{- $auto := $v.autoscaling -}}

{{- range $pool := list "attention" "experts" }}
{{- $group := get $v $pool }}
{{- if and (kindIs "float64" $group.gpusPerActor) (ne (float64 (floor $group.gpusPerActor)) $group.gpusPerActor) (ne (mulf $group.gpusPerActor $group.actorsPerPod) (floor (mulf $group.gpusPerActor $group.actorsPerPod))) }}
{{- fail (printf "%s.gpusPerActor %v times %s.actorsPerPod %v is not a whole number of GPUs per pod" $pool $group.gpusPerActor $pool $group.actorsPerPod) }}
{{- end }}
{{- end }}

{{- if and $v.experts.replicas (ne (float64 $v.attention.gpusPerActor) (float64 $v.experts.gpusPerActor)) }}
{{- fail (printf "attention.gpusPerActor %v and experts.gpusPerActor %v must be equal: both kinds of actors reserve the same" $v.attention.gpusPerActor $v.experts.gpusPerActor) }}
{{- end }}
{{- if and (eq $v.model.device "cuda") (not $v.attention.gpusPerActor) }}
{{- fail "model.device cuda needs attention.gpusPerActor and experts.gpusPerActor above 0" }}
{{- end }}

{{- with $v.model.numExperts }}
{{- if gt $experts (int64 .) }}
{{- fail (printf "experts.replicas %v times experts.actorsPerPod %v are %d actors, more than model.numExperts %v" $v.experts.replicas $v.experts.actorsPerPod $experts .) }}
{{- end }}
{{- $least := $auto.enabled | ternary (mul $auto.experts.minReplicas $v.experts.actorsPerPod) $experts }}
{{- if and $v.experts.slotsPerActor $experts (lt (mul $least $v.experts.slotsPerActor) (int64 .)) }}
{{- fail (printf "%d expert actors times experts.slotsPerActor %v hold fewer than model.numExperts %v" $least $v.experts.slotsPerActor .) }}
{{- end }}
{{- if and $auto.enabled $experts (gt (mul $auto.experts.maxReplicas $v.experts.actorsPerPod) (int64 .)) }}
{{- fail (printf "autoscaling.experts.maxReplicas %v times experts.actorsPerPod %v are more actors than model.numExperts %v" $auto.experts.maxReplicas $v.experts.actorsPerPod .) }}
{{- end }}
{{- end }}

{{- if $auto.enabled }}
{{- range $pool := list "attention" "experts" }}
{{- $limits := get $auto $pool }}
{{- $start := (get $v $pool).replicas }}
{{- if gt (int64 $limits.minReplicas) (int64 $limits.maxReplicas) }}
{{- fail (printf "autoscaling.%s.minReplicas %v exceeds maxReplicas %v" $pool $limits.minReplicas $limits.maxReplicas) }}
{{- end }}
{{- if and $start (or (lt (int64 $start) (int64 $limits.minReplicas)) (gt (int64 $start) (int64 $limits.maxReplicas))) }}
{{- fail (printf "%s.replicas %v must be from autoscaling.%s.minReplicas %v to maxReplicas %v" $pool $start $pool $limits.minReplicas $limits.maxReplicas) }}
{{- end }}
{{- end }}
{{- end }}

{{- range $name := list "head" "frontDoor" "attention" "experts" }}
{{- $size := (get $v $name).shmSize }}
{{- $bytes := include "expertmesh.bytes" $size | int64 }}
{{- if lt $bytes (int64 (mulf $v.objectStoreBytes 1.1)) }}
{{- fail (printf "%s.shmSize %v must be a tenth larger than objectStoreBytes %d, or Ray's object store falls back to disk" $name $size (int64 $v.objectStoreBytes)) }}
{{- end }}
{{- $memory := (get $v $name).resources.memory }}
{{- if ge $bytes (include "expertmesh.bytes" $memory | int64) }}
{{- fail (printf "%s.shmSize %v must be below %s.resources.memory %v, which it is taken from" $name $size $name $memory) }}
{{- end }}
{{- end }}

{{- with $v.model }}
{{- if and (eq .source "pvc") (not (or .pvc.existingClaim .pvc.create)) }}
{{- fail "model.source pvc needs model.pvc.existingClaim or model.pvc.create" }}
{{- end }}
{{- if and .pvc.existingClaim .pvc.create }}
{{- fail "model.pvc.existingClaim and model.pvc.create exclude each other" }}
{{- end }}
{{- if and .pvc.create (eq (join "," .pvc.accessModes) "ReadOnlyMany") }}
{{- fail "model.pvc.accessModes ReadOnlyMany: a claim that is created starts empty, and nobody could fill this one; make it from a filled disk and name it in model.pvc.existingClaim" }}
{{- end }}
{{- if and (eq .source "hostPath") (not .hostPath.path) }}
{{- fail "model.source hostPath needs model.hostPath.path" }}
{{- end }}
{{- if eq .source "objectStore" }}
{{- if not .objectStore.uri }}{{ fail "model.source objectStore needs model.objectStore.uri" }}{{ end }}
{{- if and (eq .objectStore.cache.type "hostPath") (not .objectStore.cache.hostPath) }}
{{- fail "model.objectStore.cache.type hostPath needs model.objectStore.cache.hostPath" }}
{{- end }}
{{- end }}
{{- end }}

{{- if and $v.auth.existingSecret $v.auth.keys }}
{{- fail "auth.existingSecret and auth.keys exclude each other" }}
{{- end }}
{{- if and $v.auth.adminToken.existingSecret $v.auth.adminToken.value }}
{{- fail "auth.adminToken.existingSecret and auth.adminToken.value exclude each other" }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) }}
{{- fail "ingress.enabled needs ingress.hosts" }}
{{- end }}
{{- if $v.grpc.ingress.enabled }}
{{- if not $v.grpc.enabled }}{{ fail "grpc.ingress.enabled needs grpc.enabled" }}{{ end }}
{{- if not $v.grpc.ingress.hosts }}{{ fail "grpc.ingress.enabled needs grpc.ingress.hosts" }}{{ end }}
{{- end }}

{{- $grace := $v.frontDoor.terminationGracePeriodSeconds }}
{{- $drain := add $v.drain.endpointSeconds $v.drain.seconds }}
{{- if and $v.drain.enabled $grace (le (int64 $grace) $drain) }}
{{- fail (printf "frontDoor.terminationGracePeriodSeconds %v must exceed drain.endpointSeconds + drain.seconds = %d, or streams are cut" $grace $drain) }}
{{- end }}

{{- include "expertmesh.validateState" . }}
{{- $own := include "expertmesh.mesh" . | fromYaml }}
{{- range $key := keys $own | sortAlpha }}
{{- if hasKey (default dict $v.mesh) $key }}
{{- fail (printf "mesh.%s is decided by other values of this chart; see the comments in values.yaml" $key) }}
{{- end }}
{{- end }}
{{- if hasKey (default dict $v.mesh) "autoscale" }}
{{- fail "mesh.autoscale is decided by the autoscaling values" }}
{{- end }}
{{- end -}}
