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

{{- /* First port for replays: the value, or the first above the ports of the ranks' events. */ -}}
{{- define "warmroute.replayPort" -}}
{{- $events := .Values.engines.events -}}
{{- $events.replayPort | default (add $events.port .Values.engines.dataParallelSize) }}
{{- end }}

{{- /* Nothing, or an error: values of the engines that do not fit each other. */ -}}
{{- define "warmroute.checked" -}}
{{- $engines := .Values.engines -}}
{{- $ranks := $engines.dataParallelSize | int -}}
{{- range $engines.args }}
{{- if regexMatch "^(--data-parallel-size|--data_parallel_size|-dp)(=.*)?$" . }}
{{- fail (printf "engines.args has %s: give engines.dataParallelSize, which the proxies are configured with too" .) }}
{{- end }}
{{- if regexMatch "^(--scheduling-policy|--scheduling_policy)(=.*)?$" . }}
{{- fail (printf "engines.args has %s: give engines.schedulingPolicy, which the proxies are configured with too" .) }}
{{- end }}
{{- end }}
{{- $gpus := get ($engines.resources.limits | default dict) "nvidia.com/gpu" -}}
{{- if and $gpus (lt ($gpus | int) $ranks) }}
{{- fail (printf "engines.resources.limits: %v nvidia.com/gpu are fewer than engines.dataParallelSize %d; give one or more for each rank" $gpus $ranks) }}
{{- end }}
{{- if $engines.events.enabled }}
{{- $port := $engines.port | int -}}
{{- $events := $engines.events.port | int -}}
{{- $replays := include "warmroute.replayPort" . | int -}}
{{- range list $events $replays }}
{{- if gt (add . $ranks -1) 65535 }}
{{- fail (printf "engines.events: %d ranks do not fit above port %d" $ranks .) }}
{{- end }}
{{- if and (ge $port .) (lt $port (add . $ranks | int)) }}
{{- fail (printf "engines.port %d is one of the ports of engines.events: %d and above, one for each rank" $port .) }}
{{- end }}
{{- end }}
{{- if and (lt $events (add $replays $ranks | int)) (lt $replays (add $events $ranks | int)) }}
{{- fail (printf "engines.events: the ports of events (%d and above) and of replays (%d and above) overlap; each of %d ranks needs its own" $events $replays $ranks) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* proxy.yaml: the values' settings and those that the chart needs. */ -}}
{{- define "warmroute.settings" -}}
{{- $settings := deepCopy .Values.proxy.settings -}}
{{- $discovery := mergeOverwrite (deepCopy ($settings.discovery | default dict)) (dict "source" "kubernetes" "kubernetes" (dict "selector" (include "warmroute.engines" .))) -}}
{{- $needed := dict "host" "0.0.0.0" "port" 9090 "discovery" $discovery -}}
{{- if .Values.proxy.keysSecret }}{{ $_ := set $needed "keys" (dict "file" "/etc/warmroute/keys/keys.yaml") }}{{ end -}}
{{- if .Values.engineKey.secret }}{{ $_ := set $needed "engine_key_env" "ENGINE_KEY" }}{{ end -}}
{{- if .Values.proxy.tlsSecret }}{{ $_ := set $needed "tls" (mergeOverwrite (deepCopy ($settings.tls | default dict)) (dict "certificate" "/etc/warmroute/tls/tls.crt" "key" "/etc/warmroute/tls/tls.key")) }}{{ end -}}
{{- toYaml (mergeOverwrite $settings $needed) }}
{{- end }}
