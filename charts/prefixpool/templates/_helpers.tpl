{{- define "prefixpool.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{- /*
The release's name alone, where it already says what this is. Leaves room for suffixes. A Service's name has no dots and begins with
a letter; releases may be called `7` or `llm.example`.
*/ -}}
{{- define "prefixpool.fullname" -}}
{{- $name := include "prefixpool.name" . -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- $own := ternary $release (printf "%s-%s" $release $name) (contains $name $release) -}}
{{- $own = ternary (print "prefixpool-" $own) $own (regexMatch "^[0-9]" $own) -}}
{{- default $own .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{- /* Name of the operator's objects, and of its Lease. */ -}}
{{- define "prefixpool.operator" -}}
{{ include "prefixpool.fullname" . }}-operator
{{- end -}}

{{- define "prefixpool.serviceAccountName" -}}
{{- default (ternary (include "prefixpool.operator" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- /* Of the operator's pods. Names are quoted wherever they stand: `helm install 123` is allowed. */ -}}
{{- define "prefixpool.selectorLabels" -}}
app.kubernetes.io/name: {{ include "prefixpool.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "prefixpool.labels" -}}
app.kubernetes.io/name: {{ include "prefixpool.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /*
Metadata of an object: (dict "root" $ "name" …), and where wanted "labels", "annotations", and "namespace", which is the release's
unless given, and none if given as "".
*/ -}}
{{- define "prefixpool.metadata" -}}
name: {{ .name | quote }}
{{- with hasKey . "namespace" | ternary .namespace .root.Release.Namespace }}
namespace: {{ . | quote }}
{{- end }}
labels:
  {{- merge dict (.labels | default dict) (.root.Values.global.commonLabels | default dict) (include "prefixpool.labels" .root | fromYaml) | toYaml | nindent 2 }}
{{- include "prefixpool.optional" (list 0 "annotations" .annotations) }}
{{- end -}}

{{- /* The same for what belongs to the operator and bears its name: (dict "root" $), and the rest as above. */ -}}
{{- define "prefixpool.operatorMetadata" -}}
{{- $own := dict "name" (include "prefixpool.operator" .root) "labels" (include "prefixpool.selectorLabels" .root | fromYaml) -}}
{{- include "prefixpool.metadata" (merge dict . $own) -}}
{{- end -}}

{{- /* A key with its value on lines of its own, or nothing if that is empty: (list 6 "tolerations" .Values.tolerations). */ -}}
{{- define "prefixpool.optional" -}}
{{- with index . 2 -}}
{{- dict (index $ 1) . | toYaml | nindent (index $ 0) -}}
{{- end -}}
{{- end -}}

{{- /* Reference of an image: (list $ .Values.image). */ -}}
{{- define "prefixpool.image" -}}
{{- $root := index . 0 -}}
{{- with index . 1 -}}
{{- with $root.Values.global.imageRegistry }}{{ . }}/{{ end -}}
{{- .repository -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}
