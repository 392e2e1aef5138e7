{{- define "deltafold.selector" -}}
app.kubernetes.io/name: deltafold
app.kubernetes.io/component: controller
{{- end }}
{{- define "deltafold.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
