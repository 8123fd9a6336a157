{{- define "warmroute.name" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains "warmroute" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-warmroute" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "warmroute.account" -}}
{{ .Values.serviceAccount.name | default (include "warmroute.name" .) }}
{{- end }}

{{- /* Labels of the pods of one part; the argument is (list . PART). Without versions: an upgrade of the chart alone restarts
no engine. */ -}}
{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- /* The label selector with which the proxy watches pods. */ -}}
{{- define "warmroute.engines" -}}
{{- $labels := .Values.engines.selector | default (fromYaml (include "warmroute.selector" (list . "engine"))) -}}
{{- $parts := list -}}
{{- range $key, $value := $labels }}{{ $parts = append $parts (printf "%s=%s" $key $value) }}{{ end -}}
{{ join "," $parts }}
{{- end }}

{{- /* proxy.yaml: the values' settings and those that the chart needs. */ -}}
{{- define "warmroute.settings" -}}
{{- $settings := deepCopy .Values.proxy.settings -}}
{{- $discovery := mergeOverwrite (deepCopy ($settings.discovery | default dict)) (dict "source" "kubernetes" "kubernetes" (dict "selector" (include "warmroute.engines" .))) -}}
{{- $needed := dict "host" "0.0.0.0" "port" 9090 "discovery" $discovery -}}
{{- if .Values.proxy.keysSecret }}{{ $_ := set $needed "keys" (dict "file" "/etc/warmroute/keys/keys.yaml") }}{{ end -}}
{{- if .Values.engineKey.secret }}{{ $_ := set $needed "engine_key_env" "ENGINE_KEY" }}{{ end -}}
{{- toYaml (mergeOverwrite $settings $needed) }}
{{- end }}
