{{- define "sinabro.labels" -}}
app.kubernetes.io/name: sinabro
{{- end }}

{{- define "sinabro.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Where the agent answers probes: "" if settings.metricsAddress switches that off. */}}
{{- define "sinabro.metricsAddress" -}}
{{ dig "metricsAddress" "127.0.0.1:9632" .Values.settings }}
{{- end }}

{{/* A probe's httpGet without its path. An address that means all of the node's is asked for on
     loopback. */}}
{{- define "sinabro.probe" -}}
{{- $address := include "sinabro.metricsAddress" . -}}
{{- $host := regexReplaceAll ":[0-9]+$" $address "" | trimPrefix "[" | trimSuffix "]" -}}
host: {{ get (dict "0.0.0.0" "127.0.0.1" "::" "::1") $host | default $host | quote }}
port: {{ regexFind "[0-9]+$" $address }}
{{- end }}
